"""What the values of --compress mean, in ``anabranch bench`` and in ``anabranch run``."""

import pytest

import anabranch as ab
from anabranch.tools.bench.compress_option import compression


def test_what_it_means() -> None:
    assert compression("bf16") == "bf16"
    assert compression("auto:int8") == ab.Auto(at_least="int8", oktopk=ab.OkTopk(warmup_steps=0))
    assert compression("oktopk") == ab.OkTopk(warmup_steps=0)
    assert compression("oktopk:0.05") == ab.OkTopk(density=0.05, warmup_steps=0)
    for wire in ("bf16", "int8"):
        assert compression(f"oktopk:0.05:{wire}") == ab.OkTopk(density=0.05, warmup_steps=0, wire=wire)
    assert compression("oktopk:bf16") == ab.OkTopk(warmup_steps=0, wire="bf16")
    assert compression("oktopk:0.05", ab.OkTopk(momentum=0.9)) == ab.OkTopk(density=0.05, momentum=0.9)


def test_what_is_unknown_is_named_with_what_is_allowed() -> None:
    for text in ("zip", "", "dense", "fp16", "bf16:0.1", "topK:0.1", "oktop:0.01", "gtopk:0.01"):
        with pytest.raises(
            ValueError, match=r"expected bf16, int8, int4, auto, .*python -m benchmarks.rivals"
        ) as error:
            compression(text)
        assert f"--compress is {text!r}" in str(error.value)


def test_a_density_is_a_share() -> None:
    for text in ("oktopk:", "oktopk:0", "oktopk:1.5", "oktopk:x", "oktopk:nan", "oktopk:-1", "oktopk:0.01:fp16"):
        with pytest.raises(ValueError, match=rf"--compress is '{text}': expected a density in \(0, 1\]"):
            compression(text)
