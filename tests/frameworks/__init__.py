"""Tests of anabranch.frameworks."""
