"""Word lists where nltk looks for them, made from the dictionary that textarena ships: nothing is downloaded."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

TAGGER = "averaged_perceptron_tagger_eng"
EVERY = 37
"""each so-manieth word is a basic one"""


def build_word_lists(folder: Path) -> Path:
    """Write the corpora ``words`` (``en`` and ``en-basic``) and a tagger to which every word is a noun."""
    spec = importlib.util.find_spec("textarena")
    assert spec is not None and spec.origin is not None
    dictionary = Path(spec.origin).parent / "envs" / "utils" / "data" / "en_US.dic"
    lines = dictionary.read_text(encoding="utf-8", errors="ignore").splitlines()[1:]
    found = sorted({word for line in lines if (word := line.partition("/")[0]).isascii() and word.isalpha()})
    words = [word for word in found if word.islower() and 3 <= len(word) <= 12]
    corpus = folder / "corpora" / "words"
    tagger = folder / "taggers" / TAGGER
    corpus.mkdir(parents=True, exist_ok=True)
    tagger.mkdir(parents=True, exist_ok=True)
    (corpus / "en").write_text("\n".join(words) + "\n", encoding="utf-8")
    ladder = [word for word in words if len(word) == 4 and word[0] == "b"]  # dense enough for word ladders
    (corpus / "en-basic").write_text("\n".join([*words[::EVERY], *ladder]) + "\n", encoding="utf-8")
    for part, content in (("weights", {}), ("tagdict", dict.fromkeys(words, "NN")), ("classes", ["NN"])):
        (tagger / f"{TAGGER}.{part}.json").write_text(json.dumps(content), encoding="utf-8")
    return folder
