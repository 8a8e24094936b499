"""Tuning without TVM: which task next, for how long, what was measured, what is kept."""
