# ---
# jupyter:
#   jupytext:
#     formats: py:percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Scoped patching
#
# A stock Hugging Face model does not run under `torch.func.vmap(torch.func.grad(...))` as soon as
# there is a padding mask. Inside `opake.patched(model)` it does, and afterwards it is exactly the
# model it was.

# %%
import torch
from torch.func import functional_call, grad, vmap
from transformers import LlamaConfig, LlamaForCausalLM

import opake

torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=100,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
)
model = LlamaForCausalLM(config).eval()

input_ids = torch.randint(0, 100, (3, 8))
attention_mask = torch.ones_like(input_ids)
attention_mask[1, 5:] = 0  # the second example is shorter
batch = {
    "input_ids": input_ids,
    "attention_mask": attention_mask,
    "labels": input_ids.masked_fill(attention_mask == 0, -100),
}

# %% [markdown]
# ## What stock does
#
# The mask is looked at, value by value, and functorch does not allow that. (The batch dimension is
# added by hand here: stock insists on one.)

# %%
params = {name: p.detach() for name, p in model.named_parameters()}


def loss(params, example):
    example = {name: value[None] for name, value in example.items()}
    return functional_call(model, params, (), example).loss


try:
    vmap(grad(loss), in_dims=(None, 0))(params, batch)
except RuntimeError as error:
    print(str(error)[:80], "...")
else:
    raise AssertionError("stock runs here after all")

# %% [markdown]
# ## The scope
#
# The table says what it does, and what it leaves alone and why.

# %%
scope = opake.patched(model)
scope.explain()

# %% [markdown]
# Inside, the model takes examples without a batch dimension. `per_example_grads` returns the
# gradient of every example, `clipped_grad_sum` the sum of the clipped ones, which is what DP-SGD
# needs, without ever holding more than `chunk_size` of them.

# %%
fmodel, params = opake.functional.make_functional(model)


def loss(params, example):
    return fmodel(params, **example).loss


with scope:
    grads, losses = opake.functional.per_example_grads(loss, params, batch)
    total, norms, _ = opake.functional.clipped_grad_sum(
        loss, params, batch, max_norm=1.0, chunk_size=2
    )

print("losses", losses)
print("norms ", norms)

# %% [markdown]
# ## The same numbers
#
# The judge is the stock model, outside the scope, one example at a time.

# %%
for i in range(3):
    model.zero_grad()
    model(**{name: value[i : i + 1] for name, value in batch.items()}).loss.backward()
    for name, p in model.named_parameters():
        torch.testing.assert_close(grads[name][i], p.grad, rtol=1e-5, atol=1e-6)

# %% [markdown]
# ## The way back
#
# Nothing is left: no attribute, no class, no registry key. Also after an exception, and in
# whichever order scopes are left.

# %%
before = {name: list(vars(module).items()) for name, module in model.named_modules()}
try:
    with opake.patched(model) as live:
        print(live.diff())
        raise ValueError("something went wrong in the middle")
except ValueError:
    pass

after = {name: list(vars(module).items()) for name, module in model.named_modules()}
for name in before:
    for (key, was), (same_key, now) in zip(before[name], after[name], strict=True):
        assert key == same_key
        assert was is now
assert type(model) is LlamaForCausalLM
assert opake.active() == []

# %% [markdown]
# ## Your own patches
#
# The same machinery is public. A `ForwardPatch` wraps the `forward` of one module; a `PatchSet`
# applies several changes together and takes them back together.

# %%
seen = []


def record(wrapped, instance, args, kwargs):
    out = wrapped(*args, **kwargs)
    seen.append(out.norm().item())
    return out


watch = opake.PatchSet([opake.ForwardPatch(layer.mlp, record) for layer in model.model.layers])

with watch, opake.patched(model):
    model(input_ids=input_ids)

print(len(seen), "layers watched;", len(opake.active()), "scopes left open")
assert len(seen) == 2
