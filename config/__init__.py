"""Configs: sections, loading and errors. Nothing here imports torch.

``config/<section>.py`` holds ``[section]`` of a training config; ``config/<command>.py`` holds the whole config of
``diffusionlm-<command>``. `config.train` lists the sections of a training run. Sections with another file:

    [run]       training.py         [schedule]   optimizer.py       [source]   data.py
    [samples]   validation.py       [profiler]   runtime.py         [model]    model_section.py
    diffusionlm-train-tokenizer     tokenizer.py
    diffusionlm-analyze             convert.py
    diffusionlm-bench-train         benchmark.py
    diffusionlm-bench-tokenizer     benchmark.py

`config.model` is config.json of a model, and `config.families` reads it. `config.base` has the field types,
`config.load` reads TOML and ``--set``, `config.schema` inspects field types, `config.dump` writes TOML.
"""
