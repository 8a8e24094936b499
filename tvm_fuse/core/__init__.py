"""The IR-neutral core: NumPy and the standard library, nothing else."""
