# %% [markdown]
# # nstf, step by step
#
# Convert a model, look inside the file, measure what was lost, and run it. Editors such as VS Code and PyCharm run the
# cells one by one; `jupytext --to notebook examples/walkthrough.py` makes a notebook of them; and
# `python examples/walkthrough.py` runs them all, in under a minute. It needs no network and no GPU.

# %%
import os
import tempfile
from pathlib import Path

import nstf
from nstf_convert.gates.difference import compare_sides
from nstf_convert.gates.sides import open_side

HERE = Path(__file__).parent if "__file__" in globals() else Path("examples")
MODEL = Path(os.environ.get("MODEL", HERE / "tiny_llama" / "model"))  # any Hugging Face folder
TEXT = Path(os.environ.get("TEXT", HERE / "data" / "prose.txt"))  # what it is calibrated on
QUESTIONS = HERE / "data" / "questions.jsonl"
folder = Path(tempfile.mkdtemp(prefix="nstf-"))

# %% [markdown]
# ## Convert
#
# Half the bytes of the checkpoint. `effort="fast"` and few samples keep it short; leave both out for a model of your own.

# %%
result = nstf.convert(
    MODEL, budget=0.5, dataset=TEXT, output=folder / "half.nstf", effort="fast", prefer="size",
    samples=4, seq_len=64,
)  # fmt: skip
print(result.output, result.size_bytes, "of", result.budget_bytes, "bytes allowed")

# %% [markdown]
# ## Look inside
#
# Reads the header alone. `decode` gives one dense tensor, and reads no other.

# %%
with nstf.open(result.output) as file:
    print(file)
    for name, tensor in list(file.tensors.items())[:6]:
        print(f"  {name:45} {tensor.encoding:28} {tensor.bits_per_weight:.2f} bits")
    largest = max(file.tensors.values(), key=lambda tensor: tensor.parameters)
    print(largest.name, file.decode(largest.name).std())

# %% [markdown]
# ## What was lost
#
# The conversion measured it on text that it had kept apart, and stored it. The mean KL divergence is in nats.

# %%
with nstf.open(result.output) as file:
    print(file.accuracy)

# %% [markdown]
# ## Tensor by tensor
#
# The same as `nstf diff MODEL half.nstf`.

# %%
with open_side(str(MODEL)) as original, open_side(str(result.output)) as converted:
    difference = compare_sides(original, converted)
for row in sorted(difference.tensors, key=lambda row: -row.relative_error)[:3]:
    print(f"{row.name}: {row.first} -> {row.second}, relative error {row.relative_error:.4f}")

# %% [markdown]
# ## Run
#
# A transformers model. Its weights stay encoded; everything that takes a transformers model takes it.

# %%
model = nstf.runtime.load(result.output)
tokenizer = nstf.runtime.load_tokenizer(result.output)
ids = model.generate(**tokenizer("The captain", return_tensors="pt"), max_new_tokens=16, do_sample=False)
text = tokenizer.decode(ids[0])
print(text)
