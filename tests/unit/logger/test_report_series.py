"""Series over steps: downsampling and smoothing."""

from __future__ import annotations

import math

import numpy as np
import pytest

from logger.report.charts import downsample, moving_average


def test_fewer_points_keep_every_extreme_and_both_ends() -> None:
    values = np.sin(np.arange(100_000) / 50.0)
    values[70_001], values[12_345] = 9.0, -9.0
    indices = downsample(values, 300)
    assert len(indices) <= 2 * 300 + 2
    assert {0, 12_345, 70_001, 99_999} <= set(indices.tolist())
    assert (np.diff(indices) > 0).all()
    # Whatever the bucket, what is left spans what was there.
    for start, end in ((0, 20_000), (40_000, 60_000)):
        inside = indices[(indices >= start) & (indices < end)]
        assert values[inside].max() == pytest.approx(values[start:end].max(), abs=1e-4)
        assert values[inside].min() == pytest.approx(values[start:end].min(), abs=1e-4)


def test_few_points_are_all_kept_and_a_gap_stays_a_gap() -> None:
    assert downsample(np.arange(10.0), 4).tolist() == list(range(10))
    values = np.arange(1000.0)
    values[200:400] = np.nan
    indices = downsample(values, 10)
    assert np.isnan(values[indices]).sum() == 2, "one place for each of the two buckets without a number"
    assert downsample(np.full(100, np.nan), 3).tolist()[0] == 0


def test_smoothing_follows_a_line_without_lag_and_passes_over_gaps() -> None:
    line = np.arange(50.0)
    assert moving_average(line)[:48] == pytest.approx(line[:48])
    assert moving_average(line)[-1] == pytest.approx((47 + 48 + 49) / 3)
    values = np.array([1.0, 2.0, math.nan, 4.0, 5.0, 6.0])
    out = moving_average(values)
    assert math.isnan(out[2])
    assert out[3] == pytest.approx((2 + 4 + 5 + 6) / 4)
    assert moving_average(np.full(3, np.nan)).tolist() == pytest.approx([math.nan] * 3, nan_ok=True)
