"""The picture of the README: the path of a model through train, shrink and serve, and what each stage offers."""

from __future__ import annotations

from html import escape

from benchmarks.svg_plot import svg

WIDTH, HEIGHT = 1040, 380
STYLE = (
    ".box{fill:var(--panel);stroke:var(--rule);stroke-width:1.5}.bar0{fill:var(--c0)}.bar1{fill:var(--c1)}"
    ".bar2{fill:var(--c2)}text.h{fill:var(--fg);font-size:19px;font-weight:650}text.item{fill:var(--fg);font-size:13px}"
    "text.cmd{font:12px ui-monospace,SFMono-Regular,Menlo,Consolas,monospace;fill:var(--soft)}"
    ".flow{stroke:var(--soft);stroke-width:2;fill:none}.tip{fill:var(--soft)}text.mid{font-size:12px}"
    ".store{fill:none;stroke:var(--soft);stroke-dasharray:4 4;stroke-width:1.2}"
)
STATIONS = (
    (
        "Train",
        "shoestring run train/dense",
        (
            "decoders from scratch: FSDP2, TP",
            "2:4 sparse steps: FST, S-STE, SR-STE",
            "loss without logits, distillation",
            "checkpoints that resume bit for bit",
        ),
    ),
    (
        "Shrink",
        "shoestring run shrink/ptq",
        (
            "2 to 8 bits: int, NF, FP grids, AFPQ",
            "GPTQ, AWQ, clip search, block-wise",
            "BitDistiller, lowbit_best, mixed bits",
            "2:4 pruning: SparseGPT, AST, CAST",
            "drafters and skip sets",
        ),
    ),
    (
        "Serve",
        "shoestring serve",
        (
            "OpenAI API, playground",
            "paged KV, prefix cache, graphs",
            "low-bit and 2:4 kernels, CPU int4",
            "exact speculative decoding",
        ),
    ),
)


def path() -> str:
    out, top, width, height = [], 70, 300, 196
    out.append('<text class="title" x="24" y="36">One package, one model format, the whole path</text>')
    for i, (name, command, items) in enumerate(STATIONS):
        x = 24 + i * (width + 48)
        out.append(f'<rect class="box" x="{x}" y="{top}" width="{width}" height="{height}" rx="8"/>')
        out.append(f'<rect class="bar{i}" x="{x}" y="{top}" width="6" height="{height}" rx="3"/>')
        out.append(f'<text class="h" x="{x + 22}" y="{top + 32}">{name}</text>')
        out.append(f'<text class="cmd" x="{x + 22}" y="{top + 54}">{escape(command)}</text>')
        for j, item in enumerate(items):
            out.append(f'<text class="item" x="{x + 22}" y="{top + 82 + 23 * j}">{escape(item)}</text>')
        if i < 2:
            y, begin = top + height / 2, x + width + 6
            out.append(f'<path class="flow" d="M{begin} {y:.0f}h26"/>')
            out.append(f'<path class="tip" d="M{begin + 24} {y - 6:.0f}l12 6l-12 6z"/>')
    y, right = top + height + 34, 24 + 3 * width + 96
    for i in range(3):
        middle = 24 + i * (width + 48) + width / 2
        tip = f'<path class="tip" d="M{middle - 6:.0f} {y - 10}l6 10l6 -10z"/>'
        out.append(f'<path class="flow" d="M{middle:.0f} {y - 28}v22"/>{tip}')
        out.append(f'<path class="tip" d="M{middle - 6:.0f} {y - 24}l6 -9l6 9z"/>')
    out.append(f'<rect class="store" x="24" y="{y}" width="{right - 24}" height="52" rx="8"/>')
    out.append(
        f'<text class="item" x="{(24 + right) / 2:.0f}" y="{y + 22}" text-anchor="middle">'
        "Hugging Face folder: config.json + safetensors, dense or packed</text>"
    )
    out.append(
        f'<text class="mid" x="{(24 + right) / 2:.0f}" y="{y + 41}" text-anchor="middle">'
        "enter and leave at any point: GGUF, GPTQ, AWQ, compressed-tensors, your own nn.Module and loop</text>"
    )
    return svg("Train, shrink and serve: the path of a model", "".join(out), WIDTH, HEIGHT, STYLE)
