"""A streamed model computes what the model itself does."""

import torch

from nstf_convert.streamed import StreamedModel


def test_stored_buffers_are_those_of_the_checkpoint() -> None:
    """A batch normalisation's mean and variance: without them a convolutional network is another one."""
    from transformers import ResNetConfig, ResNetForImageClassification

    config = ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic")
    model = ResNetForImageClassification(config).eval()
    for name, buffer in model.named_buffers():
        if buffer.is_floating_point():
            buffer.copy_(torch.rand(buffer.shape, generator=torch.Generator().manual_seed(len(name))) + 0.5)
    stated = {**config.to_dict(), "architectures": ["ResNetForImageClassification"]}
    held = model.state_dict()
    streamed = StreamedModel(stated, held.__getitem__)
    x = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        wanted = model(pixel_values=x).logits
        assert torch.allclose(streamed.outputs(pixel_values=x), wanted, rtol=1e-5, atol=1e-6)
        # A source that has none of them leaves what the constructor made.
        parameters = dict(model.named_parameters())
        bare = StreamedModel(stated, parameters.__getitem__)
        assert not torch.allclose(bare.outputs(pixel_values=x), wanted, rtol=1e-2, atol=1e-3)
