"""vLLM runs folders of `nstf export --to transformers`, encoded and divided over ranks, once nstf is installed beside it.

    nstf export model.nstf --to transformers -o folder
    vllm serve folder --load-format nstf --tensor-parallel-size 2

vLLM calls `register` in each of its processes (entry point `vllm.general_plugins`).
"""


def register() -> None:
    """Makes vLLM know the quantisation method and the load format `nstf`."""
    from nstf.integrations.vllm import plugin  # noqa: F401  (its classes register themselves)
