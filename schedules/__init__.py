"""TE schedules of tvm-fuse, one file each: a short program over named block sizes.

Imports ``tvm.te`` and ``tvm.topi`` only; ``tvm_fuse/relay/strategy.py`` registers them with Relay
for targets that carry the key ``tvm_fuse``, so a plain target keeps TVM's own schedules.
"""
