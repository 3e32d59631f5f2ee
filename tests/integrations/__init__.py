"""Tests of anabranch.integrations."""
