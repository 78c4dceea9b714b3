"""Names for numpy array types by dtype. The shape is in the docstring of the function or field that uses one."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Float32Array = NDArray[np.float32]
Float64Array = NDArray[np.float64]
Int64Array = NDArray[np.int64]
IndexArray = NDArray[np.intp]
