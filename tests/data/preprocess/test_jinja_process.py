"""Programs that come as chat templates: what they may, and how those end that take time or memory without bound."""

import time

import pytest
from slow_cases import slow_but

from megalaunch.data.preprocess.chat import jinja_process
from megalaunch.data.preprocess.chat.jinja_process import Rendering, TemplateProcess

pytest.importorskip("jinja2", reason="jinja2 is not installed")
HI = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]}


def rendered(template: str, given: dict = HI, **options: bool) -> Rendering:
    with TemplateProcess(template, **options) as process:
        return process.render([given])[0]


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(jinja_process, "_SECONDS", 0.3)  # of the parent; the process has its own


@pytest.mark.timed  # a template may take ten seconds
@pytest.mark.parametrize(
    "template",
    [
        "{{ 'a' * 10**10 }}",
        "{% for a in range(99999) %}{% for b in range(99999) %}{{ 'x' * 10000 }}{% endfor %}{% endfor %}",
        "{% set x = namespace(a='a') %}{% for i in range(99) %}{% set x.a = x.a ~ x.a %}{% endfor %}",
        "{{ '%99999999999d' % 1 }}",
    ],
)
def test_memory_and_output_are_bounded(template):
    error = rendered(template).error
    assert error in (
        "it takes more than 1024 MB of memory",
        "it writes more than 16,777,216 characters",
        "the process that ran it died, perhaps for lack of memory",
    )


ENDLESS = [
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "{{ 10 ** (10 ** 10) }}",  # within one operation, which no signal ends
]


@pytest.mark.parametrize(
    "template",
    slow_but(ENDLESS, ENDLESS[1]),
)
def test_a_template_that_does_not_end(template, quick):
    with TemplateProcess("{{ messages[0].content }}") as process:
        assert process.render([HI])[0].text == "hi"  # it is there, so that its start is not timed
        process._template = template
        started = time.monotonic()
        assert process.render([HI])[0].error == "it takes longer than 0 s, or does not end"
        assert time.monotonic() - started < 30
        process._template = "{{ messages[0].content }}"
        assert process.render([HI])[0].text == "hi", "another process does the rest"


def test_what_a_template_may_not():
    for template, reason in (
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ open('/etc/passwd').read() }}", "undefined"),
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{% for x in %}", "Expected an expression"),
        ("{{ strftime_now('%Y') }}", "undefined"),
    ):
        assert reason in rendered(template).error
    assert rendered("{{ strftime_now('%Y') }}", clock=True).text.startswith("2")
    assert "noncharacter" in rendered("x", {"messages": [], "name": "\ufdd0"}).error


def test_what_the_model_writes_is_marked():
    template = "{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' %}{% generation %}{{ m.content }}!"
    template += "{% endgeneration %}{% else %}{{ m.content | tojson }}{% endif %}\n{% endfor %}."
    found = rendered(template)
    assert found.text == '<user>"hi"<assistant>yes!.'
    assert [found.text[slice(*span)] for span in found.spans] == ["yes!"]
