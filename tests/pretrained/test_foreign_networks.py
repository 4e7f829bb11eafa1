"""No text of a store reaches a loader of another package: which networks a store may name, and with which arguments."""

import ast
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lightning_sgmcmc import Posterior
from lightning_sgmcmc.posterior.classes import NotDescribableError
from lightning_sgmcmc.posterior.description import build, describe, description_for_store
from lightning_sgmcmc.posterior.hugging_face import FAMILIES
from lightning_sgmcmc.posterior.manifest import MANIFEST
from tests.support import corpus, small_run

transformers: Any = pytest.importorskip("transformers")

MODELS = "transformers.models."
BERT = {
    "class": f"{MODELS}bert.modeling_bert:BertModel",
    "config": f"{MODELS}bert.configuration_bert:BertConfig",
    "attention": None,
}
SMALL = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8, "vocab_size": 9}


def of(family: str, model: str, **arguments: Any) -> dict[str, Any]:
    """Return the description of a family's model."""
    return {
        "class": f"{MODELS}{family}.modeling_{family}:{model}Model",
        "config": f"{MODELS}{family}.configuration_{family}:{model}Config",
        "attention": None,
        "arguments": {"dict": arguments},
    }


TIMM = {"num_classes": 2, "architecture": "resnet18", "model_args": {"checkpoint_path": "run/samples/evil.pth"}}
HOSTILE: dict[str, dict[str, Any]] = {
    "timm_wrapper": of("timm_wrapper", "TimmWrapper", **TIMM),
    "timm_wrapper, a hub": of("timm_wrapper", "TimmWrapper", architecture="hf-hub:evil/x"),
    "timm_wrapper, a folder": of("timm_wrapper", "TimmWrapper", architecture="local-dir:run/samples"),
    "timm_backbone": of("timm_backbone", "TimmBackbone", backbone_kwargs={"checkpoint_path": "run/samples/evil.pth"}),
    "perception_lm": of("perception_lm", "PerceptionLM", vision_config={"model_type": "timm_wrapper", **TIMM}),
    "vision_encoder_decoder": of("vision_encoder_decoder", "VisionEncoderDecoder", encoder={}, decoder={}),
    "detr": of("detr", "Detr", backbone_config={"model_type": "timm_backbone"}),
    "rag": of("rag", "Rag", question_encoder={"model_type": "dpr"}, generator={"model_type": "bart"}),
    "auto": {**BERT, "class": f"{MODELS}auto.modeling_auto:AutoModel", "arguments": {"dict": {}}},
    "a script": {**BERT, "class": f"{MODELS}bert.convert_bert_token_dropping:main", "arguments": {"dict": {}}},
    "nested": {**BERT, "arguments": {"dict": {**SMALL, "vision_config": {"model_type": "timm_wrapper", **TIMM}}}},
    "nested in a list": {**BERT, "arguments": {"dict": {**SMALL, "parts": [{"model_type": "timm_backbone"}]}}},
    "layers": {**BERT, "arguments": {"dict": {**SMALL, "num_hidden_layers": 10**5}}},
}


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return corpus.sound_run(tmp_path_factory.mktemp("sound") / "run")


@pytest.mark.parametrize("case", HOSTILE)
def test_other_architectures_are_refused(
    case: str, sound: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Path(shutil.copytree(sound, tmp_path / "run"))
    monkeypatch.chdir(tmp_path)
    lines = (run / "samples" / MANIFEST).read_text().splitlines()
    model = {"class": "lightning_sgmcmc.module:BayesianModule", "arguments": {"net": HOSTILE[case]}}
    lines[0] = json.dumps(json.loads(lines[0]) | {"model": model})
    (run / "samples" / MANIFEST).write_text("\n".join(lines) + "\n")
    before = set(sys.modules)
    posterior = Posterior.load(run / "samples")
    with pytest.raises(RuntimeError, match=r"trust=True|layers|no networks"):
        posterior.predict(torch.zeros(1, 2))
    family = HOSTILE[case]["class"].split(".")[2]
    named = {name for name in set(sys.modules) - before if name.startswith(MODELS) and f".{family}." in name}
    assert family == "bert" or not named


def test_texts_that_name_files_are_left_out() -> None:
    """Each could be read by a later version of a listed architecture; labels are a user's own words."""
    labels = {"0": "a/b", "1": "c:d"}
    extra = {"weights": "run/evil.pth", "source": "hf-hub:x", "model_args": {"path": "x"}, "dtype": "_inductor"}
    description = {**BERT, "arguments": {"dict": {**SMALL, **extra, "files": ["a/b"], "id2label": labels}}}
    config = build(description).config
    assert not any(hasattr(config, name) for name in ("weights", "source", "model_args", "files"))
    assert config.id2label == {0: "a/b", 1: "c:d"}


@pytest.mark.parametrize("pattern", ["(a+)+$", "(a|a)*b", r"(.*\.){30}q", ".*.*.*.*.*x"])
def test_patterns_of_adapters_end(pattern: str) -> None:
    net = {"class": "torch.nn.modules.linear:Linear", "arguments": {"in_features": 2, "out_features": 2}}
    for arguments in ({"target_modules": pattern}, {"target_modules": ["q"], "rank_pattern": {pattern: 2}}):
        with pytest.raises(NotDescribableError, match="may take for ever"):
            build({"peft": "LoraConfig", "adapter": "a", "arguments": {"dict": arguments}, "network": net})


LISTED: dict[str, tuple[str, dict[str, Any]]] = {
    "BertForSequenceClassification": ("BertConfig", SMALL),
    "DistilBertModel": ("DistilBertConfig", {"dim": 8, "n_layers": 1, "n_heads": 2, "hidden_dim": 8, "vocab_size": 9}),
    "RobertaForTokenClassification": ("RobertaConfig", SMALL),
    "XLMRobertaModel": ("XLMRobertaConfig", SMALL),
    "OpenAIGPTModel": ("OpenAIGPTConfig", {"n_embd": 8, "n_layer": 1, "n_head": 2, "vocab_size": 9}),
    "GPT2LMHeadModel": ("GPT2Config", {"n_embd": 8, "n_layer": 1, "n_head": 2, "vocab_size": 9}),
    "LlamaForCausalLM": ("LlamaConfig", SMALL),
    "MistralModel": ("MistralConfig", SMALL | {"num_key_value_heads": 1}),
    "Qwen2ForCausalLM": ("Qwen2Config", SMALL | {"num_key_value_heads": 1}),
    "ViTForImageClassification": (
        "ViTConfig",
        {k: v for k, v in SMALL.items() if k != "vocab_size"} | {"image_size": 8, "patch_size": 4},
    ),
    "ResNetForImageClassification": ("ResNetConfig", {"embedding_size": 4, "hidden_sizes": [4, 8], "depths": [1, 1]}),
    "T5ForConditionalGeneration": (
        "T5Config",
        {"d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": 1, "num_heads": 2, "vocab_size": 9},
    ),
    "CLIPModel": (
        "CLIPConfig",
        {
            "text_config": SMALL,
            "vision_config": {k: v for k, v in SMALL.items() if k != "vocab_size"} | {"image_size": 8, "patch_size": 4},
        },
    ),
}


@pytest.mark.parametrize("name", LISTED)
def test_listed_architectures_come_back(name: str) -> None:
    kind, options = LISTED[name]
    net = getattr(transformers, name)(getattr(transformers, kind)(**options))
    twin = build(json.loads(json.dumps(describe(net))))
    twin.load_state_dict(net.state_dict())
    assert type(twin) is type(net)


LOADERS = {"from_pretrained", "load_backbone", "create_model", "cached_file", "hf_hub_download", "snapshot_download"}
LOADERS |= {"import_module", "__import__", "open", "get_class_from_dynamic_module", "load_state_dict_from_url"}


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_a_listed_architecture_builds_from_numbers_alone(family: str) -> None:
    """Its source in the installed transformers calls no loader, and no class that chooses an architecture by a text."""
    folder = Path(transformers.__file__).parent / "models" / family
    files = [*folder.glob("modeling_*.py"), *folder.glob("configuration_*.py")]
    if not files:
        pytest.skip("this version of transformers does not have it")
    names: set[str] = set()
    for file in files:
        tree = ast.parse(file.read_text())
        nodes = list(ast.walk(tree))
        calls = [node.func for node in nodes if isinstance(node, ast.Call)]
        names |= {f.attr if isinstance(f, ast.Attribute) else getattr(f, "id", "") for f in calls}
        names |= {node.id for node in nodes if isinstance(node, ast.Name) and node.id.startswith("Auto")}
        imported = [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)]
        names |= {"timm" for module in imported if "timm" in module or module.endswith("auto")}
        names |= {"timm" for node in nodes if isinstance(node, ast.Import) if "timm" in ast.dump(node)}
    assert not names & (LOADERS | {"timm"})
    assert not {name for name in names if name.startswith(("AutoModel", "AutoBackbone", "AutoConfig"))}


class Reader(nn.Linear):
    """A user's network that takes the name of a file."""

    def __init__(self, weights: str, count: int = 2) -> None:
        super().__init__(2, count)
        self.weights, self.count = weights, count


def test_a_text_reaches_no_constructor_of_another_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """As `SentenceTransformer("owner/name")`, if a program has imported it."""
    description = {"class": f"{__name__}:Reader", "arguments": {"weights": "evil", "count": 2}}
    assert isinstance(build(description), Reader)
    monkeypatch.setattr(sys.modules[__name__], "__file__", "/usr/lib/site-packages/other/network.py")
    with pytest.raises(NotDescribableError, match=r"another package.*evil.*trust=True"):
        build(description)
    assert isinstance(build(description, trust=True), Reader)


def test_a_path_reaches_no_constructor() -> None:
    net = Reader("a/b.pth")
    description = describe(net)
    with pytest.raises(NotDescribableError, match=r"yours.*a/b\.pth.*net="):
        build(description)
    with pytest.warns(UserWarning, match=r"whether you trust the folder.*a/b\.pth"):
        description_for_store(small_run.module(net=net))
