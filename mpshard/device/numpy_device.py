"""The NumPy device: every kernel of `mpshard.device.base.Device` on the cores of one process.

Matrix products are BLAS's; everything between them is blocked to the cache and written in place. The kernels
work in float32 and in float64, in which the tests compare them with finite differences.
"""

from __future__ import annotations

from mpshard.device.numpy_activation import ActivationKernels
from mpshard.device.numpy_cache import CachedAttentionKernels
from mpshard.device.numpy_embedding import EmbeddingKernels
from mpshard.device.numpy_loss import LossKernels
from mpshard.device.numpy_norm import NormKernels
from mpshard.device.numpy_random import DropoutKernels
from mpshard.device.numpy_update import UpdateKernels


class NumpyDevice(
    EmbeddingKernels, NormKernels, ActivationKernels, CachedAttentionKernels, LossKernels, DropoutKernels, UpdateKernels
):
    """Implements `mpshard.device.base.Device`, where the methods are described.

    Parameters
    ----------
    poison : bool
        For tests: memory handed out or given back is filled with NaN.
    """
