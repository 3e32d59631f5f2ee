"""Tests of anabranch.fsdp.planning."""
