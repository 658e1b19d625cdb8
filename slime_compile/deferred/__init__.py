"""Lazy logits of a model: the head's matmul is in the graph of a compiled loss.

    handle       defer_logits: the head's forward hands out `DeferredLogits`; handle.remove() undoes it
    head         which module that is, and what must hold for it
    column_parallel   Megatron's head
    sharded      a weight that is a DTensor
    own_forward  LoRA, dequantised weights: a forward around linear maps
    logits       DeferredLogits: what behaves as the tensor, outside of a compiled function and inside
    methods      which of a tensor's methods leave them as they are
    expressions  what it stands for: a product, and what was done since
    changed      changes in place that a compiled function would lose
    pytree       where DDP and FSDP look for tensors
    autograd_functions, frames   what Dynamo and autograd would get wrong in silence
    places       the user's lines at which the logits were made after all

Trainers call the model and compute the loss afterwards: what they compile is given logits, which are then held whole.
Here the head returns hidden states, weight and bias. In a function under torch.compile they become
`F.linear(hidden, weight, bias)` in its graph, which the backend makes in chunks; anywhere else the tensor is computed
where it is first needed, and kept.
"""
