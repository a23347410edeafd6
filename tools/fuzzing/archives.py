"""Damaged data sets: tars, folders, idx files and what lies beside the images."""

import contextlib
import gzip
import io
import json
import os
import random
import tarfile
from pathlib import Path
from typing import Any

from fuzzing.cases import Case, Files, Set, Wrong, encoded, pictures
from fuzzing.mutations import mutate_bytes, mutate_json
from PIL import Image


def packed_tar(files: Files, form: int = tarfile.USTAR_FORMAT) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=form) as tar:
        for name, data in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return out.getvalue()


def archive_seeds(_: Path) -> list[Case]:
    small = [encoded(Image.fromarray(p).resize((12, 10)), "JPEG") for p in pictures()]
    tree = {f"train/{c}/{i}.jpg": small[i] for c in ("a", "b") for i in (0, 1)} | {
        "classes.json": b'{"a": "ant", "b": "bee"}'
    }
    parts: Files = {}
    for i, data in enumerate(small):
        facts = json.dumps({"label": [i, 0], "caption": "a star"} if i % 2 else {"label": [i], "captions": ["a", "b"]})
        parts |= {f"k{i}.jpg": data, f"k{i}.json": facts.encode(), f"k{i}.txt": b"a cat\na dog\n"}
    labelled = {
        f"k{i}.{kind}": data for i, image in enumerate(small) for kind, data in (("jpg", image), ("cls", b"%d" % i))
    }
    long = {f"{'deep/' * 30}{name}": data for name, data in labelled.items()}
    idx = {
        "train-images-idx3-ubyte": b"\0\0\x08\x03" + b"".join(n.to_bytes(4) for n in (5, 6, 7)) + bytes(210),
        "train-labels-idx1-ubyte": b"\0\0\x08\x01" + (5).to_bytes(4) + bytes(range(5)),
    }
    pairs = {"train/a.jpg": small[0], "train/a.txt": b"a cat", "train/x/b.jpg": small[1]}
    uri = "wds:{folder}/{{split}}.tar"
    forms = [(labelled, tarfile.USTAR_FORMAT), (parts, tarfile.PAX_FORMAT), (long, tarfile.GNU_FORMAT)]
    found = [Case({"train.tar": packed_tar(*form)}, {"uri": uri}) for form in forms]
    found += [
        Case({"train.tar": packed_tar(long, tarfile.PAX_FORMAT), "classes.json": b'["ant", "bee"]'}, {"uri": uri})
    ]
    found += [Case({"train.tar.gz": gzip.compress(packed_tar(labelled), mtime=0)}, {"uri": uri + ".gz"})]
    found += [
        Case({"x.tar": packed_tar(tree)}, {"uri": "folder:{folder}/x.tar"}),
        Case(tree, {"uri": "folder:{folder}"}),
    ]
    found += [Case(idx, {"uri": "idx:{folder}"}), Case(pairs, {"uri": "pairs:{folder}"})]
    found += [Case({f"{n}.gz": gzip.compress(d, mtime=0) for n, d in idx.items()}, {"uri": "idx:{folder}"})]
    return found


def archive_make(rng: random.Random, seeds: list[Case]) -> Case:
    seed = rng.choice(seeds)
    name = rng.choice(list(seed.files))
    data = seed.files[name]
    if name.endswith(".gz") and rng.random() < 0.7:  # damage under the compression
        return Case(seed.files | {name: gzip.compress(mutate_bytes(rng, gzip.decompress(data)), 1, mtime=0)}, seed.call)
    if name.endswith(".tar") and rng.random() < 0.7:  # a damaged header whose checksum is right
        block = bytearray(data)
        at = 512 * rng.randrange(len(data) // 512)
        block[at : at + 512] = mutate_bytes(rng, bytes(block[at : at + 512])).ljust(512, b"\0")[:512]
        block[at + 148 : at + 156] = b"        "
        block[at + 148 : at + 156] = b"%06o\0 " % sum(block[at : at + 512])
        return Case(seed.files | {name: bytes(block)}, seed.call)
    change = mutate_json if name.endswith(".json") else mutate_bytes
    return Case(seed.files | {name: change(rng, data)}, seed.call)


def archive_run(case: Case, folder: Path, _: Any) -> str:
    from softmoe.data import BrokenImage, captions_of, open_source

    os.environ["SOFTMOE_CACHE"] = str(folder / "cache")
    source = open_source(case.call["uri"].format(folder=case.write(folder)), "train")
    for index in range(min(len(source), 50)):
        with contextlib.suppress(BrokenImage):
            example = source.read(index)
            if any(not 0 <= label < len(source.classes) for label in example.labels):
                raise Wrong(f"the labels {example.labels} of {len(source.classes)} classes")
    captions_of(source, range(min(len(source), 50)))
    return "right"


ARCHIVES = Set(archive_seeds, archive_make, archive_run)
