"""Configs: sections, loading and errors. Nothing here imports torch.

``config/training/<section>.py`` holds ``[section]`` of a training config; ``config/<command>.py`` holds the whole
config of ``diffusionlm-<command>``. `config.train` lists the sections of a training run. Sections with another file:

    [run]         training/training.py      [schedule]   training/optimizer.py       [source]   data.py
    [checkpoint]  training/training.py      [profiler]   training/runtime.py         [model]    model_section.py
    [samples]     training/validation.py    [tokenizer]  tokenizer.py                [data]     data.py
    diffusionlm-train-tokenizer     tokenizer.py
    diffusionlm-analyze             convert.py
    diffusionlm-bench-train         bench/training.py
    diffusionlm-bench-tokenizer     bench/training.py

`config.model` is config.json of a model, and `diffusionlm.families` reads it. `config.base` has the field types,
`config.load` reads TOML and ``--set``, `config.schema` inspects field types, `config.dump` writes TOML, and
`config.spellings` lists renamed and removed keys.
"""
