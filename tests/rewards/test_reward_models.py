from __future__ import annotations

import copy
import threading
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForSequenceClassification, ProcessorMixin

from envgrad.errors import ChatTemplateError, ConfigurationError, RewardFailure, RewardTimeout
from envgrad.rewards import RewardModel, RewardModelOptions
from envgrad.rewards.models import bounded, load_reward_model
from helpers.models import tiny_llama, tokenizer_of
from helpers.rewards import answered, batch, called, plain, score, task
from helpers.tokenizers import CHATML, bpe_tokenizer

TOKENIZER = tokenizer_of()
SHOUT = "{% for m in messages %}{{ m.role[0] + ':' + m.content + ';' }}{% endfor %}"


def ids(text, tokenizer=TOKENIZER):
    return tokenizer.encode(text, add_special_tokens=False)


class Weighted(nn.Module):
    """Scores a row by the sum of its tokens times their places, counted from 1; padding that counts would show."""

    def __init__(self, wrap=lambda scores: scores):
        super().__init__()
        self.wrap, self.calls, self.dropout = wrap, [], nn.Dropout(0.9)

    def forward(self, input_ids, attention_mask):
        self.calls.append(SimpleNamespace(ids=input_ids, mask=attention_mask, training=self.training,
                                          grad=torch.is_grad_enabled(), thread=threading.current_thread()))  # fmt: skip
        places = attention_mask.cumsum(1)
        return self.wrap(self.dropout((input_ids * places * attention_mask).sum(1).float()))


def weighted(text, tokenizer=TOKENIZER):
    return float(sum(place * token for place, token in enumerate(ids(text, tokenizer), 1)))


def chatml(*turns):
    return "".join(f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in turns)


@pytest.fixture(scope="module")
def llama():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(TOKENIZER), hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2,
        num_labels=1, pad_token_id=None, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    return LlamaForSequenceClassification(config).eval()


@pytest.fixture(scope="module")
def saved(llama, tmp_path_factory):
    path = tmp_path_factory.mktemp("models") / "tiny-rm"
    llama.save_pretrained(path)
    TOKENIZER.save_pretrained(path)
    return path


@pytest.mark.parametrize(
    "wrap",
    [
        lambda scores: scores,
        lambda scores: scores[:, None],
        lambda scores: SimpleNamespace(logits=scores),
        lambda scores: SimpleNamespace(logits=scores[:, None]),
    ],
)
def test_any_module_scores_chats_and_plain_text(wrap):
    model = RewardModel(Weighted(wrap), "rm", TOKENIZER)
    chats = [answered("hello"), answered("he", prompt="all the tools")]
    texts = [
        chatml(("user", "Say."), ("assistant", "hello")),
        chatml(("user", "all the tools"), ("assistant", "he")),
    ]
    assert score(model, chats) == [weighted(text) for text in texts]
    assert score(model, [plain(" hello"), plain("")]) == [weighted("Say hello"), weighted("Say")]


def test_rows_are_padded_on_the_right_in_a_thread_without_gradients():
    module = Weighted().train()
    module.dropout.eval()  # a mode of its own, which must survive
    model = RewardModel(module, "rm", bpe_tokenizer(CHATML, pad="<pad>"))
    module.calls.clear()
    score(model, [plain(" hello hello"), plain("")])
    (call,) = module.calls
    long, short = ids("Say hello hello"), ids("Say")
    pad = TOKENIZER.convert_tokens_to_ids("<pad>")
    assert call.ids.tolist() == [long, short + [pad] * (len(long) - len(short))]
    assert call.mask.tolist() == [[1] * len(long), [1] * len(short) + [0] * (len(long) - len(short))]
    assert not call.training and not call.grad and call.thread is not threading.main_thread()
    assert module.training and not module.dropout.training


def test_a_left_padding_tokenizer_is_neither_used_nor_changed():
    tokenizer = bpe_tokenizer(CHATML)
    tokenizer.padding_side, tokenizer.pad_token = "left", None
    before = copy.deepcopy(tokenizer.init_kwargs)
    model = RewardModel(Weighted(), "rm", tokenizer)
    assert score(model, [plain(" hello hello"), plain("")]) == [weighted("Say hello hello"), weighted("Say")]
    assert tokenizer.padding_side == "left" and tokenizer.pad_token is None and tokenizer.init_kwargs == before


def test_its_own_template_and_its_variables():
    tokenizer = bpe_tokenizer("{% if loud %}!{% endif %}" + SHOUT)
    quiet = RewardModel(Weighted(), "rm", tokenizer)
    loud = RewardModel(Weighted(), "rm", tokenizer, RewardModelOptions(chat_template_kwargs={"loud": True}))
    assert score(quiet, [answered("hello")]) == [weighted("u:Say.;a:hello;")]
    assert score(loud, [answered("hello")]) == [weighted("!u:Say.;a:hello;")]


def test_a_chat_with_tools_is_rendered_whole():
    model = RewardModel(Weighted(), "rm", bpe_tokenizer(SHOUT), RewardModelOptions(has_tools=True))
    assert score(model, [called()]) == [weighted("s:Be brief.;u:Count.;a:;t:now 1;a:done;")]


def test_the_episode_decides_and_not_the_row():
    model = RewardModel(Weighted(), "rm", TOKENIZER)
    images = task({"images": ["an image"]})  # no prompt at all
    assert score(model, [answered("hello", task=images)]) == score(model, [answered("hello")])
    chat = task({"prompt": [{"role": "user", "content": "Say"}]})
    assert score(model, [plain(" hello", task=chat)]) == [weighted("Say hello")]


def test_chats_need_a_template():
    model = RewardModel(Weighted(), "rm", bpe_tokenizer(None))
    assert score(model, [plain(" hello")]) == [weighted("Say hello")]
    with pytest.raises(
        ConfigurationError, match=r"'rm' has to score chats.*no chat template.*reward_processing_classes"
    ):
        score(model, [answered("hello")])
    with pytest.raises(ChatTemplateError):
        RewardModel(Weighted(), "rm", bpe_tokenizer("{{ nothing }}"))


# -- transformers models


def test_a_transformers_model_scores_the_last_token_by_hand(llama):
    model = copy.deepcopy(llama)
    (layer,) = model.model.layers
    with torch.no_grad():  # only the embedding, the norm and the head are left
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()
    reward = load_reward_model(model, "rm", TOKENIZER)
    embedding, head = model.model.embed_tokens.weight.detach(), model.score.weight.detach()[0]

    def by_hand(token):
        vector = embedding[token]
        return float(head @ (vector / (vector.pow(2).mean() + model.config.rms_norm_eps).sqrt()))

    scores = score(reward, [plain(" hello hello hello"), plain(" the")])
    assert scores == pytest.approx([by_hand(ids("Say hello hello hello")[-1]), by_hand(ids("Say the")[-1])], abs=1e-6)
    assert model.config.pad_token_id is None


def test_batches_do_not_change_scores(llama, monkeypatch):
    monkeypatch.setattr("envgrad.rewards.models.MAX_BATCH_TOKENS", 12)
    reward = load_reward_model(llama, "rm", TOKENIZER)
    texts = [" hello" * n for n in (7, 1, 2, 5, 3)]
    alone = [llama(torch.tensor([ids("Say" + text)])).logits.item() for text in texts]
    assert score(reward, [plain(text) for text in texts]) == pytest.approx(alone, abs=1e-5)


def test_a_name_loads_model_and_tokenizer(saved, llama):
    reward = load_reward_model(saved, "rm", options=RewardModelOptions(model_init_kwargs={"dtype": torch.float64}))
    assert reward.model.dtype == torch.float64
    own = load_reward_model(llama, "rm", TOKENIZER)
    assert score(reward, [answered("hello")]) == pytest.approx(score(own, [answered("hello")]), abs=1e-5)
    assert score(load_reward_model(reward.model, "rm"), [plain("x")]) == score(reward, [plain("x")])


def test_an_untrained_head_is_no_reward_model(tmp_path):
    tiny_llama().save_pretrained(tmp_path)
    with pytest.raises(ConfigurationError, match=r"has no weights for \['score.weight'\].*random"):
        load_reward_model(tmp_path, "rm")


def test_what_cannot_be_loaded(tmp_path, llama):
    with pytest.raises(ConfigurationError, match="reward model '/no/where' cannot be loaded"):
        load_reward_model("/no/where", "where")
    llama.save_pretrained(tmp_path)
    with pytest.raises(ConfigurationError, match=r"no tokenizer can be loaded.*reward_processing_classes"):
        load_reward_model(tmp_path, "rm")
    with pytest.raises(ConfigurationError, match=r"'rm' needs a tokenizer.*reward_processing_classes"):
        load_reward_model(Weighted(), "rm")


# -- errors


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (Weighted(lambda scores: scores[:, None].repeat(1, 2)), r"scores of shape \(2, 2\) for 2 rows.*num_labels=1"),
        (Weighted(lambda scores: scores.sum()), r"scores of shape \(\) for 2 rows"),
        (Weighted(lambda scores: scores[:1]), r"scores of shape \(1,\) for 2 rows"),
        (Weighted(lambda scores: [1.0]), "returned list; it must return a tensor"),
        (nn.Linear(1, 1), "cannot be called with input_ids and attention_mask: TypeError"),
    ],
)
def test_a_module_of_another_kind_is_found_at_construction(module, message):
    with pytest.raises(ConfigurationError, match=f"'rm' .*{message}"):
        RewardModel(module, "rm", TOKENIZER)


def test_a_language_model_is_no_reward_model():
    with pytest.raises(ConfigurationError, match=r"scores of shape \(2, 2, \d+\)"):
        RewardModel(tiny_llama(), "rm", TOKENIZER)


def test_no_tokenizer():
    class Processor(ProcessorMixin):
        def __init__(self): ...

    with pytest.raises(ConfigurationError, match="'rm': its processing class is a Processor"):
        RewardModel(Weighted(), "rm", Processor())
    tokenizer = bpe_tokenizer(CHATML)
    tokenizer.pad_token = tokenizer.eos_token = None
    with pytest.raises(ConfigurationError, match="neither a pad nor an eos token"):
        RewardModel(Weighted(), "rm", tokenizer)


def test_nan_infinite_broken_and_slow_models():
    behaviour = {"now": lambda scores: scores}
    model = RewardModel(Weighted(lambda scores: behaviour["now"](scores)), "rm", TOKENIZER)
    episodes = [plain("a"), plain("b")]
    behaviour["now"] = lambda scores: torch.stack([scores[0], scores[1] * float("nan")])
    assert score(model, episodes) == [weighted("Saya"), None]
    behaviour["now"] = lambda scores: scores / 0
    with pytest.raises(RewardFailure, match="'rm' returned inf for completion 0"):
        score(model, episodes)
    behaviour["now"] = lambda scores: scores[99]
    with pytest.raises(RewardFailure, match="reward model 'rm' raised IndexError") as caught:
        score(model, episodes)
    assert isinstance(caught.value.__cause__, IndexError)
    over = threading.Event()
    behaviour["now"] = lambda scores: over.wait(20) and scores
    with pytest.raises(RewardTimeout, match=r"reward model 'rm' took longer than 0\.05 s"):
        score(model, batch(episodes, timeout=0.05))
    over.set()
    assert score(model, []) == []


def test_chunks_are_bounded_by_their_padded_tokens():
    rows = [[0] * n for n in (3, 1, 1, 9, 2, 2)]
    chunks = list(bounded(rows, 6))
    assert [[len(row) for row in chunk] for chunk in chunks] == [[3, 1], [1], [9], [2, 2]]
    assert list(bounded([], 6)) == []
