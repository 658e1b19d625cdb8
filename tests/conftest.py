"""One thread per test process: several run beside each other, and threads that wait for each other spin.

On a busy machine a softmax of 7 x 37 numbers takes 5 ms with two threads and 5 us with one.
"""

import torch

torch.set_num_threads(1)

# A torch for CUDA without a device replaces its guard by an object of the first thread that traces, and torch 2.11
# calls it after that thread has ended. This thread lasts.
torch._C._ensureCUDADeviceGuardSet()
