from __future__ import annotations

import pytest

from instep.utils.redact import hide, hide_arguments


@pytest.mark.parametrize(
    ("words", "shown", "left_out"),
    [
        (["t.py", "--lr", "0.1", "--tokenizer", "gpt2"], None, ()),
        (["--num_tokens", "512", "--max-token", "512", "--monkey", "x", "--passes=3", "--key-file", "k.pem"], None, ()),
        (["--api-key", "abc"], ["--api-key", "***"], ("--api-key",)),
        (["--wandb.api_key=abc", "x"], ["--wandb.api_key=***", "x"], ("--wandb.api_key",)),
        (["--password=a b,c"], ["--password=***"], ("--password",)),
        (["+logger.token=abc"], ["+logger.token=***"], None),
        (["--hf_token", "-abc"], ["--hf_token", "***"], ("--hf_token",)),
        (["--use-token", "--lr", "1"], None, ()),
        (["--env", '{"apiKey": "a b", "n": 1}'], ["--env", '{"apiKey": ***, "n": 1}'], None),
        (["s3://me:pw@host/x?token=abc&y=1"], ["s3://***@host/x?token=***&y=1"], None),
        (["--note", "sk-abcdefghijklmnop"], ["--note", "***"], None),
        (["--password", "12345678"], ["--password", "***"], ("--password",)),
    ],
)
def test_arguments_without_secrets(words: list[str], shown: list[str] | None, left_out: tuple[str, ...] | None) -> None:
    kept, names = hide_arguments(words)
    assert list(kept) == (shown or words)
    assert bool(names) is (shown is not None)
    if left_out is not None:
        assert names == left_out
    assert hide_arguments(kept)[0] == kept


def test_variables_without_secrets() -> None:
    assert hide({"A_TOKEN": "x", "B": {"KEY": "y", "C": 1}}) == {"A_TOKEN": "***", "B": {"KEY": "***", "C": 1}}
