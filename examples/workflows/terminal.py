"""A shell agent: its commands run in a sandbox, and tests of the files are the reward. Tasks are made on the spot."""

import itertools
import random

LETTERS = "abcd"
KINDS = {  # task, right command, wrong command that people have typed too, what is there before, and the test
    "copy {x} to {y}": ("cp {x} {y}", "mv {x} {y}", "echo {n} > {x}", '[ "$(cat {x}) $(cat {y})" = "{n} {n}" ]'),
    "move {x} to {y}": ("mv {x} {y}", "cp {x} {y}", "echo {n} > {x}", '[ ! -e {x} ] && [ "$(cat {y})" = {n} ]'),
    "empty {x}": ("> {x}", "rm {x}", "echo {n} > {x}", "[ -e {x} ] && [ ! -s {x} ]"),
    "remove {x}": ("rm {x}", "rm *", "touch {x} {y}", "[ ! -e {x} ] && [ -e {y} ]"),
    "make folder {x}": ("mkdir {x}", "touch {x}", "touch {y}", "[ -d {x} ] && [ -f {y} ]"),
}


def tasks(seed, size, test, wrong=0.0):
    """Rows of the training set, or of the test set, which has other combinations of file names.

    `wrong` is the share of reference answers that do not solve their task.
    """
    rng = random.Random(seed)
    names = [(x, y) for x, y in itertools.permutations(LETTERS, 2) if ((ord(x) + 3 * ord(y)) % 5 == 0) == test]
    rows = []
    for _ in range(size):
        (x, y), n, task = rng.choice(names), rng.randrange(4), rng.choice(list(KINDS))
        question, right, habit, before, check = (text.format(x=x, y=y, n=n) for text in (task, *KINDS[task]))
        answer = habit if rng.random() < wrong else right
        messages = [{"role": "user", "content": question}]
        rows.append({"question": messages, "answer": answer, "before": before, "test": check})
    return rows


def train():
    return tasks(seed=0, size=8192, test=False, wrong=0.6)


def test():
    return tasks(seed=1, size=64, test=True)


async def run(row, client, sandbox):
    await sandbox.run(row["before"])
    completion = await client.chat.completions.create(model="policy", messages=row["question"])
    command = completion.choices[0].message.content or ""
    await sandbox.run(command.replace("\0", ""), timeout_s=5)
    return float((await sandbox.run(row["test"])).status == 0)
