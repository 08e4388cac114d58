"""``ask_torch.py FILE``: write what Horovod's CMake files want to know of torch as CMake's set().

The names and their meaning are those of Horovod 0.28.1's cmake/Modules/FindPytorch.cmake.
"""

from __future__ import annotations

import os
import sys

import torch
from torch.utils import cpp_extension


def main() -> None:
    """Ask torch, write the answers."""
    is_wanted = os.environ.get("LOFT_HVD_HOROVOD_CUDA") != "0"
    has_cuda = is_wanted and torch.version.cuda is not None and bool(cpp_extension.CUDA_HOME)
    has_rocm = torch.version.hip is not None and bool(cpp_extension.ROCM_HOME)
    # The CUDA kind adds the toolkit's folders, and refuses to be made without a toolkit.
    kind = cpp_extension.CUDAExtension if has_cuda or has_rocm else cpp_extension.CppExtension
    module = kind("", [])  # type: ignore[no-untyped-call]  # torch leaves it unannotated
    has_new_abi = bool(torch.compiled_with_cxx11_abi())
    flags = [f"-D_GLIBCXX_USE_CXX11_ABI={int(has_new_abi)}"]
    if has_rocm:
        flags = [*cpp_extension.COMMON_HIPCC_FLAGS, *flags]
    answers = {
        "Pytorch_VERSION": torch.__version__,
        "Pytorch_CUDA": str(has_cuda).upper(),
        "Pytorch_ROCM": str(has_rocm).upper(),
        "Pytorch_CXX11": str(has_new_abi).upper(),
        "Pytorch_COMPILE_FLAGS": " ".join(flags),
        "Pytorch_INCLUDE_DIRS": ";".join(module.include_dirs),
        "Pytorch_LIBRARY_DIRS": ";".join(module.library_dirs),
        "_Pytorch_LIBRARIES": ";".join(module.libraries),
    }
    with open(sys.argv[1], "w", encoding="utf-8") as file:
        for name, value in answers.items():
            file.write(f"set({name} [==[{value}]==])\n")


if __name__ == "__main__":
    main()
