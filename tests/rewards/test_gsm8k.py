import subprocess
import sys
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_like.rewards.gsm8k import check, final_answer, quick, verify
from areal_like.rewards.reading import read_response


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
        ("That is 10-20.", "10-20"),
        ("From (3)-7", "(3)-7"),
        ("From 10 to -20", "-20"),
        ("It is \u22123", "-3"),
        ("A loss of -$3.", "-3"),
        ("Paid 10-$7", "10-7"),
        (r"It is -\$1,250.50 now", "-1,250.50"),
        ("#### \u2212£3", "-3"),
        ("#### 5 €", "5"),
        ("#### **7**", "7"),
        ("**#### 7**", "7"),
        ("**Answer:**\n**#### $7** in all", "7 in all"),
        ("#### **$7.** (seven)", "7"),
        ("#### 7 (twenty-one less fourteen):", "7"),
        ("####: = -7:", "-7"),
        ("#### **7** apples", "7 apples"),
        ("#### .5", ".5"),
        ("####", None),
        ("no number", "no number"),
        ("So (1, 2) it is", "(1, 2)"),
        ("So the probability is $\\frac{1}{2}$.", r"\frac{1}{2}"),
        ("It has 3 sides and x^2 + 1", "x^2 + 1"),
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


@pytest.mark.parametrize(
    ("response", "wanted"),
    [
        ("#### 7 apples", "7"),
        ("#### 7 dollars", "7"),
        ("#### 18 eggs left", "18"),
        ("#### **18** eggs (left over)", "18"),
        ("#### **18 eggs a day.**", "18"),
        ("#### $7,", "7"),
        ("#### 7. So 7 remain.", "7"),
        ("#### 7 eggs. That is 10 - 3.", "7"),
        ("#### 1,250 miles per hour", "1250"),
        ("#### -7 degrees", "-7"),
        ("#### 1.50 dollars", "1.5"),
        (r"\boxed{18 pens}", "18"),
    ],
)
def test_what_follows_the_number_does_not_decide(response, wanted):
    for other in (wanted, "6"):
        answer, reward = f"#### {other}", float(other == wanted)
        assert verify(response, answer) == reward
        assert quick(response, answer) in (reward, None)


@pytest.mark.parametrize("response", ["7 dozen", "7 and a half", "7 pi", "7x", "7/2 miles", "7 - 2"])
def test_what_makes_it_another_number_does(response):
    assert quick(f"#### {response}", "#### 7") in (0.0, None)
    assert verify(f"#### {response}", "#### 7") == 0.0


def test_quick_is_quick():
    start = time.monotonic()
    for response in ("7" * 40_000 + "x", "7 ab" + ". " * 20_000 + "1", "7" + " " * 40_000 + "9"):
        quick(f"#### {response}", "#### 7")
    for repeated in (
        "\nQuestion: 7",
        "<think>",
        "<answer>",
        r"\boxed{7} ",
        "7 in ",
        "$7$ and ",
        "a = 7 or ",
        "Would you? ",
    ):
        quick(repeated * 5_000, "#### 7")
    assert time.monotonic() - start < 3


@pytest.mark.parametrize(
    ("response", "answer", "reward"),
    [
        ("#### 7 eggs", "#### 7", 1.0),
        ("#### 8 eggs", "#### 7", 0.0),
        ("#### 1,250 eggs", "It is 1250.\n#### 1250", 1.0),
        ("#### -0", "#### 0", 1.0),
        ("no answer", "#### 7", 0.0),
        ("#### 1.5 eggs", "#### 1.50", 1.0),
        (r"#### \text{Monday}", r"#### \text{Monday}", 1.0),
        (r"#### \frac{14}{2}", "#### 7", 1.0),
        (r"#### \sqrt{49}", "#### 7", None),
    ],
)
def test_quick_settles_what_needs_no_mathematics(response, answer, reward):
    assert quick(response, answer) == reward
    assert verify(response, answer) == (1.0 if reward is None else reward)


def test_code_in_a_response_is_not_run(tmp_path):
    trace = tmp_path / "trace"
    assert verify(f"#### __import__('pathlib').Path('{trace}').touch()", "#### 1") == 0.0
    assert not trace.exists()


@settings(max_examples=200)
@given(
    given_number=st.integers(-2000, 2000),
    wanted=st.integers(-2000, 2000) | st.none(),
    form=st.sampled_from(["#### {}", "#### {:,}", "#### {} eggs", "it is {}.", "\\boxed{{{}}}", "#### 0{}", "none"]),
)
def test_quick_says_what_verify_says(given_number, wanted, form):
    response = form.format(given_number)
    answer = f"#### {given_number if wanted is None else wanted}"
    reward = quick(response, answer)
    assert reward is None or reward == verify(response, answer)


@pytest.mark.parametrize("answer", ["#### 7", r"#### \frac{1}{2}"])
def test_an_answer_far_longer_than_the_reference_is_none(answer):
    """However it would compare: a model that repeats itself must not occupy the verifier."""
    wanted = final_answer(answer)
    padded = f"{wanted} {r'+ 0 ' * 15}"
    assert quick(rf"\boxed{{{padded}}}", answer) is None and verify(rf"\boxed{{{padded}}}", answer) == 1.0
    longer = f"{wanted} {r'+ 0 ' * 40}"
    assert quick(rf"\boxed{{{longer}}}", answer) == verify(rf"\boxed{{{longer}}}", answer) == 0.0


def test_a_long_reference_allows_long_answers():
    matrix = r"\begin{pmatrix}" + r"\\".join(str(n) for n in range(60)) + r"\end{pmatrix}"
    assert verify(rf"\boxed{{{matrix}}}", f"#### {matrix}") == 1.0


def test_words_after_a_plain_number_do_not_make_it_long():
    assert quick(f"#### 7 eggs. {'That is what remains. ' * 20}", "#### 7") == 1.0


@pytest.mark.parametrize(
    "answer",
    ["It is 2.\n#### 2", "one", r"\frac{1}{2}", "(1, 2)", "1, 2", "1e+16", r"[0, \infty)", "x^2 + 1", "B", "12 ft"],
)
def test_a_reference_that_is_read_as_a_whole_has_no_fault(answer):
    assert check(answer) is None
    assert verify(rf"\boxed{{{final_answer(answer) if '####' in answer else answer}}}", answer) == 1.0


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        ("It is 2.\n####", "no final answer"),
        (r"\boxed{}", "no final answer"),
        (r"\frac{1}{2", "an answer that cannot be read as a whole"),
        ("x^2 +", "an answer that cannot be read as a whole"),
        ("one two " * 20, "an answer that cannot be read as a whole"),
        ("He buys 3 pens and has 5 dollars left.", "a sentence with several numbers as an answer"),
    ],
)
def test_a_reference_that_cannot_be_read_as_a_whole_is_found(answer, problem):
    assert check(answer)[0] == problem


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        ("So she makes $18 by selling 9 eggs.", "$18"),
        ("It takes 120/24 = 5 hours to read 120 pages.", "5"),
        ("He will have 18 apples, not 20.", "18"),
        ("The number is not 18.", ""),
        ("It is between 10 and 18.", ""),
        ("It could be 18.", ""),
        ("How many are 18?", ""),
        ("She makes 9 * 2 =", ""),
        ("The total is 18. Would you like the 3 steps?", "18"),
        ("The result of step 1 is 4. So there are 18 in all.", "18"),
        ("Final Answer: The largest $n$ is 34.", "34"),
        (r"\boxed{255} is the interest. Final Answer: The final answer is $10,455$.", "10,455"),
        ("<think>The answer is 17.</think>It is 18.", "18"),
        ("<think>The answer is 17.", ""),
        ("The answer is 18.\n\nQuestion: What is 1 + 2?\nThe answer is 3.", "18"),
        (r"\boxed{17} or \boxed{18}", "17; 18"),
        (r"It is \boxed{18", ""),
    ],
)
def test_an_answer_is_what_a_response_states(response, answer):
    assert read_response(response) == answer


def test_quick_and_check_leave_the_symbolic_library_alone():
    code = (
        "import sys; from areal_like.rewards.verifiers import REWARDS; v = REWARDS['gsm8k'];"
        "v.check('#### 2'); v.quick('#### x', '#### 2'); assert not {'sympy', 'math_verify'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
