"""What the process that cells are forked from imports beside `preload`, where there is no CUDA device.

megatron-core asks for one when it is imported, and torch allows no CUDA in a process that is forked after that.
"""

from bench.cases.functions import has_megatron, megatron_cross_entropy

if has_megatron():
    megatron_cross_entropy()
