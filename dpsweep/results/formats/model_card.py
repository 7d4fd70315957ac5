"""The lines of Python in a language model's card: text in; a class, numbers or text out."""

from dataclasses import dataclass
from pathlib import Path
from string import Template

from dpsweep.config.trial import TrialConfig
from dpsweep.data import DataConfig
from dpsweep.data.read import list_class_names
from dpsweep.data.tables import RowData
from dpsweep.data.tasks import Classification, MultiLabel, Regression
from dpsweep.data.text import GenerationData, TextData, find_tokenizer, read_tokenizer
from dpsweep.models.huggingface import HuggingFace

RANDOM_HEAD = (
    'Read the classifier by these lines: `pipeline("text-classification")` of transformers would '
    "put an untrained head on the model."
)
ADAPTER = (
    "`adapter/` has the trained part alone. It loads with peft onto the public model that it was "
    "trained from; correct `PUBLIC_MODEL` if that lies elsewhere:"
)
_USE = {
    "mean": "(hidden * weight).sum(1) / weight.sum(1)",
    "first": "hidden[:, 0]",
    "last": "hidden[range(len(hidden)), attention_mask.sum(1) - 1]",
}
_CLASSIFY = '''
$imports

$load
head = load_file("head.safetensors")


@torch.no_grad()
def predict(input_ids, attention_mask, **segments):
    """Outputs of each example, whose own tokens come first; segments: token_type_ids of pairs."""
    given = {"input_ids": input_ids, "attention_mask": attention_mask, **segments}
    hidden = body(**given).last_hidden_state
    weight = attention_mask[:, :, None].to(hidden)
    return ($pooled) @ head["weight"].T + head["bias"]
$texts'''
_TEXTS = '''

$names

def $verb(texts):
    """$what of each of a list of $each."""
    $encode
    outputs = predict(**given)
    return $result
'''
_ENCODE = """given = tokenizer(
        $given, padding="max_length", truncation=True, max_length=$length, return_tensors="pt"
    )"""
_ENCODE_FILE = """found = tokenizer.encode_batch(texts)
    parts = {"input_ids": "ids", "attention_mask": "attention_mask"$segments}
    given = {k: torch.tensor([getattr(x, part) for x in found]) for k, part in parts.items()}"""
_LOAD_FILE = """tokenizer = Tokenizer.from_file("tokenizer.json")
tokenizer.enable_truncation($length)
tokenizer.enable_padding(length=$length, pad_id=$padding)
"""
_GENERATE = '''
$imports

$load


@torch.no_grad()
def write(prompt, max_tokens=$max_tokens):
    """Text after a prompt: the likeliest token each time, until the end or $length tokens."""
    ids = tokenizer.encode(prompt + $separator, add_special_tokens=False)$ids
    given = torch.tensor([ids])
    most = min(max_tokens, $length - len(ids))
    found = model.generate(
        input_ids=given, attention_mask=torch.ones_like(given), max_new_tokens=most
    )
    answer = [x for x in found[0, len(ids) :].tolist() if x != $end]
    return tokenizer.decode(answer, skip_special_tokens=True)
'''


@dataclass(frozen=True)
class ModelCode:
    """Facts of a trained model that the lines are made from."""

    config: TrialConfig
    # why transformers does not read the trial's tokenizer; empty if it does. Then a copy of its
    # file lies beside the card, where it is known
    no_tokenizer: str
    segments: bool  # True if token_type_ids of pairs are given

    def write_block(self, folder: str) -> str:
        """Write a block of Python that uses `folder` beside the card: model or adapter."""
        data, model = self.config.data, self.config.model
        assert isinstance(model, HuggingFace)
        generates = isinstance(data, GenerationData)
        imports, load = self._load(model, folder, generates=generates)
        values = {
            "imports": "\n".join(sorted(imports, key=_sort_import)).replace("files\n", "files\n\n"),
            "load": load,
            "pooled": _USE[model.pool],
            "texts": self._write_texts(),
        }
        if isinstance(data, GenerationData):
            values |= {
                "max_tokens": str(data.task.max_tokens),
                "length": str(data.length),
                "separator": repr(data.separator),
                "ids": ".ids" if self.no_tokenizer else "",
                "end": str(data.load_coder()[1]),
            }
        text = _GENERATE if generates else _CLASSIFY
        return f"```python\n{Template(text).substitute(values).strip()}\n```"

    def _load(self, model: HuggingFace, folder: str, *, generates: bool) -> tuple[list[str], str]:
        """Return the lines that import, and those that load tokenizer and model of a folder."""
        kind, name = ("AutoModelForCausalLM", "model") if generates else ("AutoModel", "body")
        names, lines, imports = [kind], [], ["import torch"]
        if not generates:
            imports.append("from safetensors.torch import load_file")
        if isinstance(self.config.data, TextData | GenerationData):
            if self.no_tokenizer:
                imports.append("from tokenizers import Tokenizer")
                lines.append(self._load_file())
            else:
                names.append("AutoTokenizer")
                lines.append(f'tokenizer = AutoTokenizer.from_pretrained("{folder}")')
        if folder == "adapter":
            more, public = _locate_public(model)
            imports += ["from peft import PeftModel", *more]
            lines += [
                f"PUBLIC_MODEL = {public}",
                f"public = {kind}.from_pretrained(PUBLIC_MODEL, dtype=torch.float32)",
            ]
            if generates:  # the public model may ask for sampling or penalties
                names.append("GenerationConfig")
                lines.append(
                    'public.generation_config = GenerationConfig.from_pretrained("adapter")'
                )
            lines.append(f'{name} = PeftModel.from_pretrained(public, "adapter").eval()')
        else:
            lines.append(f'{name} = {kind}.from_pretrained("{folder}").eval()')
        imports.append(f"from transformers import {', '.join(sorted(names))}")
        return imports, "\n".join(lines)

    def _load_file(self) -> str:
        data = self.config.data
        assert isinstance(data, TextData | GenerationData)
        if isinstance(data, GenerationData):
            return (
                'tokenizer = Tokenizer.from_file("tokenizer.json")\n'
                "tokenizer.no_truncation()\ntokenizer.no_padding()"
            )
        padding = read_tokenizer(find_tokenizer(data.tokenizer)).padding
        return Template(_LOAD_FILE).substitute(length=data.length, padding=padding).strip()

    def _write_texts(self) -> str:
        """Write the function that takes texts; empty if the data's tokens are made elsewhere."""
        data = self.config.data
        if not isinstance(data, TextData):
            return ""
        pairs = not isinstance(data.text, str)
        verb, what, result = _describe_result(data)
        encode = Template(_ENCODE_FILE if self.no_tokenizer else _ENCODE).substitute(
            given="*map(list, zip(*texts))" if pairs else "list(texts)",
            length=data.length,
            segments=', "token_type_ids": "type_ids"' if self.segments else "",
        )
        each = f"pairs of texts ({', '.join(data.text)})" if pairs else "texts"
        return Template(_TEXTS).substitute(
            names=f"NAMES = {name_outputs(data)!r}\n" if "NAMES" in result else "",
            verb=verb,
            what=what,
            each=each,
            encode=encode,
            result=result,
        )


def name_outputs(data: DataConfig) -> list[str]:
    """Name what a model's outputs stand for: classes, or columns."""
    if isinstance(data.task, Classification):
        return list(list_class_names(data))
    if isinstance(data.task, MultiLabel | Regression):
        assert isinstance(data, RowData)
        return list(data.targets)
    return []


def _describe_result(data: TextData) -> tuple[str, str, str]:
    """Name of the function, what it returns, and the expression that makes it of `outputs`."""
    names = name_outputs(data)
    if isinstance(data.task, Classification):
        return "classify", "Class", "[NAMES[k] for k in outputs.argmax(1)]"
    if isinstance(data.task, MultiLabel):
        return "classify", "Labels", "[[k for k, x in zip(NAMES, row) if x > 0] for row in outputs]"
    if isinstance(data.task, Regression):
        return "estimate", ", ".join(names), "outputs.tolist()"
    return "compute", "Outputs", "outputs"


def _locate_public(model: HuggingFace) -> tuple[list[str], str]:
    """Return the imports that name the public model's folder, and the expression."""
    if model.folder is not None:
        return [], repr(str(Path(model.folder).expanduser()))
    assert model.package is not None
    inside = model.place.parts[model.place.parts.index(model.package) + 1 :]
    parts = "".join(f' / "{part}"' for part in inside)
    return ["from importlib.resources import files"], f'str(files("{model.package}"){parts})'


def _sort_import(line: str) -> tuple[bool, bool, str]:
    """Key that puts the standard library first, then whole modules."""
    return "importlib" not in line, not line.startswith("import"), line
