import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_like.rewards.gsm8k import final_answer, quick, verify


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("She has 5 + 2 = 7.\n#### 7", "7"),
        ("#### 3\nno, rather\n#### 4\nthat is it", "4"),
        (r"First \boxed{3}, then \boxed{\frac{1}{2}} of it", r"\frac{1}{2}"),
        ("12 apples and 1,250 pears.", "1,250"),
        ("It costs #### $18.", "18"),
        (r"#### 5 or rather \boxed{6}", "6"),
        ("It is -3", "-3"),
        ("That is 10-20.", "20"),
        ("From (3)-7", "7"),
        ("From 10 to -20", "-20"),
        ("#### **7**", "7"),
        ("#### **$7.** (seven)", "7"),
        ("#### 7 (twenty-one less fourteen):", "7"),
        ("####: = -7:", "-7"),
        ("#### **7** apples", "7 apples"),
        ("#### .5", ".5"),
        ("####", None),
        ("no number", None),
    ],
)
def test_final_answer(text, answer):
    assert final_answer(text) == answer


@pytest.mark.parametrize(
    "response", ["#### 1250", "#### 1,250", "#### $1,250.", "#### 1250.00", r"\boxed{\frac{2500}{2}}"]
)
def test_equal_answers_are_rewarded(response):
    assert verify(response, "It is 1250.\n#### 1,250") == 1.0


@pytest.mark.parametrize(
    "response",
    [
        "#### **7",
        "#### 7 (8)",
        "#### 7 (x)",
        "#### 7 (xy + z)",
        "#### 7 or 8",
        "#### 2**3**2",
        "#### 7 million",
        "#### 6-7",
    ],
)
def test_decoration_is_no_answer(response):
    """What is left out around an answer is not what would make it another one."""
    assert verify(response, "#### 7") == verify(response, "#### 232") == 0.0


@pytest.mark.parametrize(
    "response", ["#### 125", "#### -1250", "####", "none", "#### 1250.5", r"\boxed{\frac{1}{1250}}"]
)
def test_unequal_answers_are_not_rewarded(response):
    assert verify(response, "#### 1,250") == 0.0


def test_code_in_a_response_is_not_run(tmp_path):
    trace = tmp_path / "trace"
    assert verify(f"#### __import__('pathlib').Path('{trace}').touch()", "#### 1") == 0.0
    assert not trace.exists()


@settings(max_examples=200, deadline=None)
@given(
    given_number=st.integers(-2000, 2000),
    wanted=st.integers(-2000, 2000) | st.none(),
    form=st.sampled_from(["#### {}", "#### {:,}", "it is {}.", "\\boxed{{{}}}", "#### 0{}", "none"]),
)
def test_quick_says_what_verify_says(given_number, wanted, form):
    response = form.format(given_number)
    answer = f"#### {given_number if wanted is None else wanted}"
    reward = quick(response, answer)
    assert reward is None or reward == verify(response, answer)
