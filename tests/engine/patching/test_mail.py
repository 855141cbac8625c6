"""Patch mails: what is read, and what is refused with file and line."""

import pytest

from eldr.engine.patching import mail
from eldr.engine.patching.errors import PatchError

MAIL = b"""From 0000000000000000000000000000000000000000 Mon Sep 17 00:00:00 2001
From: A <a@example.org>
Date: Fri, 2 Jan 2026 03:04:05 +0000
Subject: Call a hook whose name is so long that the mail's subject line is folded here
 and goes on

Why it is so.

Upstream-Base: v1.0
Forwarded: https://example.org/1

diff --git a/vllm/a.py b/vllm/a.py
index 1111111111111111111111111111111111111111..2222222222222222222222222222222222222222 100644
--- a/vllm/a.py
+++ b/vllm/a.py
@@ -1,3 +1,4 @@ def f():
 one
-two
+deux
+et demi
 three
"""


def test_reads_subject_trailers_and_hunks():
    patch = mail.parse("a.patch", MAIL)
    assert patch.subject.startswith("Call a hook")
    assert patch.subject.endswith("is folded here and goes on")
    assert patch.trailers == {"Upstream-Base": "v1.0", "Forwarded": "https://example.org/1"}
    (file,) = patch.files
    assert (file.path, file.adds_file, patch.added, patch.removed) == ("vllm/a.py", False, 2, 1)
    (hunk,) = file.hunks
    assert hunk.old == ("one\n", "two\n", "three\n")
    assert hunk.new == ("one\n", "deux\n", "et demi\n", "three\n")
    assert hunk.heading == "def f():"


def test_encoded_subject_and_git_signature():
    raw = MAIL.replace(
        MAIL[MAIL.index(b"Call a hook") : MAIL.index(b"\n\nWhy")],
        b"=?UTF-8?q?Z=C3=A4hler?=",
    )
    assert mail.parse("a.patch", raw + b"-- \n2.39.5\n\n").subject == "Zähler"


def test_missing_newline_at_the_end_of_a_file():
    raw = MAIL.replace(b" three\n", b" three\n\\ No newline at end of file\n")
    (hunk,) = mail.parse("a.patch", raw).files[0].hunks
    assert hunk.old[-1] == hunk.new[-1] == "three"


def test_form_feed_is_not_a_line_end():
    assert mail.split_lines("a\x0cb\r\nc\u2028d\n") == ["a\x0cb\r\n", "c\u2028d\n"]


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        (b"Subject: ", b"Topic: ", "no Subject"),
        (b"diff --git", b"diff --hg", "no `diff --git` line"),
        (b"@@ -1,3 +1,4 @@", b"@@ -1,3 +1,5 @@", "ends in the middle of a hunk"),
        (b"@@ -1,3 +1,4 @@", b"@@ -1,2 +1,4 @@", "longer than its header says"),
        (b"@@ -1,3 +1,4 @@", b"@@ -1,3 @@", "malformed hunk header"),
        (b" three\n", b" three\nstray\n", "unexpected text"),
        (b"-two\n", b"two\n", "expected a context"),
        (b"index 111", b"rename from x\nindex 111", "only added and changed"),
        (b"index 111", b"deleted file mode 100644\nindex 111", "only added and changed"),
        (b"index 111", b"old mode 100644\nindex 111", "only added and changed"),
        (b"--- a/vllm", b"GIT binary patch\n--- a/vllm", "only added and changed"),
        (b"a/vllm/a.py b/vllm/a.py", b"a/../a.py b/../a.py", "leave the tree"),
        (b"a/vllm/a.py b/vllm/a.py", b"a/vllm/a.py b/vllm/b.py", "one file twice"),
        (b"\n", b"\r\n", "CRLF"),
    ],
)
def test_refuses(old, new, says):
    assert old in MAIL
    with pytest.raises(PatchError, match=says) as raised:
        mail.parse("a.patch", MAIL.replace(old, new))
    assert "a.patch" in str(raised.value)
