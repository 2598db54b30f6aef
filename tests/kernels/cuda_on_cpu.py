"""Turns kernels/_cuda/lowbit_few.cu and sparse24.cu into C++ for a CPU: functions of inline assembly give way to those
of cuda_on_cpu.h, few_on_cpu.h and sparse24_on_cpu.h.

Clusters are of one block here, and only bf16 activations are emulated; everything else of the kernel (decoding,
indexing, rings, panels, sums) is the source that NVRTC compiles.
"""

from __future__ import annotations

import re

REPLACED = (
    "shared_address", "copy_async", "copy_or_zero", "copy_word_async", "commit", "wait_all_but", "mma", "load_x",
    "sub2", "mul2", "mul_relu2", "half_float", "narrow", "magic_register", "field",
)  # fmt: skip
SPARSE_REPLACED = (
    "shared_address", "copy_async", "copy_or_zero", "commit", "wait_all_but", "ask_for", "mma_sp", "load_x", "sub2",
    "mul2", "half_float", "narrow", "magic_register", "field",
)  # fmt: skip


def without_function(source: str, name: str) -> str:
    found = re.search(rf"^(template <[^>]*> )?INLINE \w+ {name}\(", source, flags=re.MULTILINE)
    assert found, name
    depth, quoted, at = 0, False, source.index("{", found.start())
    while True:
        letter = source[at]
        if letter == '"':
            quoted = not quoted
        if not quoted:
            depth += {"{": 1, "}": -1}.get(letter, 0)
            if depth == 0:
                return source[: found.start()] + source[at + 1 :]
        at += 1


def cpu_source(source: str, replaced: tuple[str, ...] = REPLACED) -> str:
    source = source.split("// ---- the whole weight, decoded")[0]
    source = re.sub(r"^#if SPLIT > 1\n.*?^#endif\n", "", source, flags=re.MULTILINE | re.DOTALL)
    for name in replaced:
        source = without_function(source, name)
    source = source.replace("extern __shared__ __align__(1024) char smem[];", "")
    source = re.sub(r"^typedef .*\n", "", source, flags=re.MULTILINE)
    source = source.replace('asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));', "rank = 0;")
    source = source.replace('asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(ranks));', "ranks = 1;")
    source = re.sub(r'asm volatile\("griddepcontrol[^"]*"[^;]*\);', "", source)
    source = re.sub(r'if \(ranks > 1\) asm volatile\("barrier.cluster.*\n\s*else', "", source)
    source = re.sub(r'if \(ranks > 1\) asm volatile\("barrier.cluster.*\n', "", source)
    source = re.sub(r'asm volatile\("(mapa|ld\.shared::cluster)[^;]*;"[^;]*;', 'fail("a cluster");', source)
    assert not re.search(r"\basm\b", re.sub(r"//.*", "", source)), "assembly that the emulation does not know"
    return source
