"""What the tests of the vision backbones share."""
import torch


def images(n=2, size=32, chans=3, seed=1):
    """Random images in float64; `size` is that of both sides, or height and width."""
    size = (size, size) if isinstance(size, int) else size
    return torch.randn(n, chans, *size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def close(a, b, tolerance=1e-10):
    torch.testing.assert_close(a, b, rtol=0, atol=tolerance)


def same_weights(ours, theirs, seed=0, **options):
    """A model of two classes with the same weights; norms and biases are moved away from one and zero."""
    torch.manual_seed(seed)
    ours = ours(**options)
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    theirs = theirs(**options)
    theirs.load_state_dict(ours.state_dict(), strict=True)
    return ours, theirs
