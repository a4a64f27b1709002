"""Sizes of tiles and grids, on the host. Triton's own functions for it wrap their arguments for use in kernels, which
takes microseconds a call, and a layer makes dozens of them.
"""


def cdiv(whole: int, part: int) -> int:
    """Parts of that size that cover the whole."""
    return -(-whole // part)


def power_of_2(number: int) -> int:
    """The smallest power of two that is not less, for numbers >= 1."""
    return 1 << (number - 1).bit_length()
