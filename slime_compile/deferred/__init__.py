"""Lazy logits of a model: the head's matmul is in the graph of a compiled loss.

    handle       defer_logits: the head's forward returns `DeferredLogits`; handle.remove() undoes it
    head         finds that module, and checks its requirements
    column_parallel   Megatron's head
    sharded      a weight that is a DTensor
    own_forward  LoRA, dequantised weights: a forward around linear maps
    logits       DeferredLogits: behaves as the tensor, outside of a compiled function and inside
    methods      a tensor's methods that stay deferred
    expressions  the value of lazy logits: a product, and later operations
    changed      changes in place that a compiled function would lose
    pytree       for the search of DDP and FSDP for tensors
    autograd_functions, frames   silent errors of Dynamo and autograd
    places       the user's lines that computed the logits

Trainers call the model and compute the loss afterwards: a compiled loss gets logits, so these exist in full. With a
deferred head the model returns hidden states, weight and bias. In a function under torch.compile they become
`F.linear(hidden, weight, bias)` in its graph, which the backend runs in chunks. Elsewhere the first use computes the
tensor and keeps it.
"""
