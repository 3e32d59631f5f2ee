"""Tests of anabranch.sharded."""
