"""Compiles kernels for GPUs that need not be there: python -m tests.compile_kernels FILE

FILE.json lists [module, kernel, signature, constants, warps, capability]; prints a JSON list of
{"shared": bytes, "spills": bytes, "ptx": text}. In a process of its own, without the interpreter.
"""

import importlib
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource


def compile_one(module, name, signature, constants, warps, capability):
    """Pointers and `V`, `n`, `D` are taken as multiples of 16, as they are at real sizes."""
    kernel = getattr(importlib.import_module(module), name)
    signature = {k: signature.get(k, "constexpr") for k in kernel.arg_names}
    constants = {(kernel.arg_names.index(k),): v for k, v in constants.items()}
    even = [["tt.divisibility", 16]]
    attrs = {
        (i,): even
        for i, k in enumerate(kernel.arg_names)
        if signature[k].startswith("*") or k in ("V", "n", "D")
    }
    source = ASTSource(kernel, signature, constants, attrs)
    target = GPUTarget("cuda", capability, 32)
    made = triton.compile(source, target=target, options=dict(num_warps=warps))
    return dict(shared=made.metadata.shared, ptx=made.asm["ptx"], **usage(made, capability))


def usage(made, capability):
    """Registers a thread and spilled bytes, as the assembler reports them."""
    ptxas = get_ptxas(capability) if get_ptxas.__code__.co_argcount else get_ptxas()
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "k.ptx")
        path.write_text(made.asm["ptx"])
        arch = re.search(r"\.target (\w+)", made.asm["ptx"])[1]
        command = [ptxas.path, "-v", f"-arch={arch}", str(path), "-o", str(path) + ".cubin"]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    spills = sum(map(int, re.findall(r"(\d+) bytes spill", said)))
    return dict(registers=int(re.search(r"(\d+) registers", said)[1]), spills=spills)


if __name__ == "__main__":
    print(json.dumps([compile_one(*job) for job in json.loads(Path(sys.argv[1]).read_text())]))
