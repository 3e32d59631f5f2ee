"""Profiles of steps that train, and their gradients in buckets."""

import pytest

from anabranch.planning.memory.account import OKTOPK, WAYS
from anabranch.planning.memory.step_profile import MemoryUse, StepProfile, buckets_by_size
from anabranch.tools.predict.memory.probe import probe
from tools.predict.memory.models import images


def test_a_model_that_trains_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="the step has no gradients: expected a model with parameters"):
        StepProfile(0, (), MemoryUse(0))


def test_buckets_close_at_their_size_and_vectors_keep_apart() -> None:
    profile = probe(images(8))
    buckets = buckets_by_size(profile, 64 * 1024, WAYS[OKTOPK].compresses)
    assert sorted(index for bucket in buckets for index in bucket.indices) == list(range(len(profile.gradients)))
    assert all(profile.gradients[index].sparse == bucket.compressed for bucket in buckets for index in bucket.indices)
    assert {bucket.compressed for bucket in buckets} == {True, False}
