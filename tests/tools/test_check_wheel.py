import pytest

from check_wheel import WheelError, _check_kernels, kernel_rows, speed_ratios
from graftlm.layers.kernel_levels import cpu_features, levels_of

TABLE = """kernel     seconds  level  from   file
layer_ops  0.0      {level}  {origin}  /a b/layer_ops-1.so
sampling   0.0      {level}  wheel  /a b/sampling-1.so
compiled nothing
demo: started and ran a request in 1.0 s
"""
BEST = next((level.name for level in levels_of(*cpu_features())), None)


def test_the_table_of_kernels_is_parsed():
    rows = kernel_rows(TABLE.format(level="amx", origin="cache"))
    assert rows == {"layer_ops": ("amx", "cache"), "sampling": ("amx", "wheel")}


@pytest.mark.skipif(BEST is None, reason="this CPU has no level that is compiled ahead")
def test_kernels_of_the_best_level_from_the_wheel_pass(capsys):
    _check_kernels(TABLE.format(level=BEST, origin="wheel"))
    assert f"kernels of level {BEST} from the wheel: layer_ops, sampling" in capsys.readouterr().out


@pytest.mark.parametrize(
    "table",
    [TABLE.format(level=BEST, origin="cache"), TABLE.format(level="another", origin="wheel"), "compiled nothing\n"],
)
def test_other_kernels_fail(table):
    with pytest.raises(WheelError, match="expected kernels of level"):
        _check_kernels(table)


def test_speed_ratios_compare_an_engine_with_the_base():
    runs = [("a", "base", 95.0), ("b", "base", 30.0), ("a", "model.kernels=native", 100.0), ("b", "other", 20.0)]
    report = {"runs": [{"workload": w, "variant": v, "output_tokens_per_s": speed} for w, v, speed in runs]}
    assert speed_ratios(report) == {"a": 0.95, "b": 1.5}
