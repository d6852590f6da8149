"""The commands that a shell script would start, with their words; the script is read, and no program is started.

Assignments, conditions, loops and functions are followed as far as the script alone gives their values. Where a
condition depends on more, such as on a file, all of its branches are read, and their differences are unknown.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from allocation.convert.shell_conditions import Status, check_expression, check_words, matches
from allocation.convert.shell_scope import Scope, ShellWord, Unknown, Variable, append_text, as_words
from allocation.convert.shell_syntax import Node, ShellSyntaxError, line_of, parse, start_of
from allocation.convert.shell_words import Words, count

_MOST_STEPS = 20_000
_DEEPEST = 40
_NO_NPU = re.compile(r"torch_npu|npu-smi")  # a run has CUDA GPUs or none, so a script's search for NPUs finds none
_LOCAL = ("local", "declare", "typeset")
_SHELLS = ("bash", "sh", "zsh")


@dataclass(frozen=True, slots=True)
class Command:
    """A command that the script would start: its words, and its line."""

    words: tuple[ShellWord, ...]
    line: int


@dataclass
class Script:
    """The commands of a script in their order, and the files that it includes without being read here."""

    commands: list[Command] = field(default_factory=list)
    included: list[str] = field(default_factory=list)


class _End(Exception):
    """Raised at the end of a script, a function, a loop's round or a loop."""

    def __init__(self, what: str) -> None:
        super().__init__(what)
        self.what = what


def read_script(text: str) -> Script:
    """Return the commands that a script would start. Raises ShellSyntaxError for text that is not a script."""
    shell = _Shell(text, Scope(), Script())
    try:
        shell.run(parse(text).get("Stmts") or ())
    except _End:
        pass
    except RecursionError as error:
        raise ShellSyntaxError("the script is nested too deeply") from error
    return shell.script


class _Shell:
    """Follows the statements of `text`."""

    def __init__(self, text: str, scope: Scope, script: Script) -> None:
        self.text = text
        self.scope = scope
        self.script = script
        self.functions: dict[str, tuple[Node, str]] = {}
        self.output: list[ShellWord] | None = None  # of the command substitution that is read
        self.steps = 0
        self.depth = 0
        self.locals: list[dict[str, tuple[bool, Variable]]] = []  # variables that the running functions replaced
        self.place: tuple[int, int] | None = None  # of text that `eval` reads, in the script

    @property
    def words(self) -> Words:
        """Return the expansion of words with the present variables."""
        return Words(self.text, self.scope, self._substitute, self.place)

    def run(self, statements: Sequence[Node]) -> Status:
        """Run statements, and return the status of the last one."""
        status: Status = True
        for statement in statements:
            status = self._statement(statement)
        return status

    def _statement(self, node: Node) -> Status:
        self.steps += 1
        if self.steps > _MOST_STEPS:
            raise ShellSyntaxError(f"the script has more than {_MOST_STEPS} steps; this is the limit")
        written = len(self.output) if self.output is not None else 0
        status = self._command(node.get("Cmd") or {"Type": "CallExpr"}, node)
        if self.output is not None and any(_hides_output(each) for each in node.get("Redirs") or ()):
            del self.output[written:]
        return not status if node.get("Negated") and status is not None else status

    def _command(self, node: Node, statement: Node) -> Status:
        match node["Type"]:
            case "CallExpr":
                return self._call(node) if node.get("Args") else self._assign_all(node.get("Assigns") or ())
            case "DeclClause":
                return self._declare(node)
            case "Block":
                return self.run(node.get("Stmts") or ())
            case "Subshell":
                return self._run_apart(lambda: self.run(node.get("Stmts") or ()))
            case "BinaryCmd":
                return self._pair(node)
            case "IfClause":
                return self._if(node)
            case "CaseClause":
                return self._case(node)
            case "WhileClause":
                return self._loop(lambda: self._condition(node), lambda: self.run(node["Do"]), node)
            case "ForClause":
                return self._run_for(node)
            case "FuncDecl":
                self.functions[node["Name"]["Value"]] = (node["Body"], self.text)
                return True
            case "TestClause":
                return check_expression(node["X"], self.words)
            case "ArithmCmd":
                return self._calculate(node["X"])
            case "LetClause":
                return [self._let(each) for each in node["Exprs"]][-1]
            case "TimeClause":
                return self._statement(node["Stmt"]) if node.get("Stmt") else True
        raise ShellSyntaxError(f"line {line_of(statement)}: `{node['Type']}` is not read", start_of(statement))

    # ------------------------------------------------------------------ assignments

    def _assign_all(self, assignments: Sequence[Node]) -> Status:
        values = [self._assign(each) for each in assignments]
        return None if any(value and value.unknown for value in values) else True

    def _assign(self, node: Node) -> ShellWord | None:
        name, words = node["Name"]["Value"], self.words
        if node.get("Array"):
            elements = node["Array"].get("Elems") or ()
            if any(each.get("Index") for each in elements):
                self.scope.forget(name, f"${name}, a map")
                return None
            found = tuple(word for each in elements for word in words.fields(each["Value"]))
            before = self.scope.get(name) if node.get("Append") else ()
            self.scope.set(name, (*as_words(before), *found))
            return None
        value = words.value(node.get("Value"))
        if node.get("Index"):
            self._assign_element(name, node, value)
            return value
        before = self.scope.get(name)
        if node.get("Append") and isinstance(before, tuple):
            self.scope.set(name, (ShellWord(before[0].text + value.text), *before[1:]) if before else (value,))
        elif node.get("Append"):
            self.scope.set(name, append_text(name, before, self.scope.has(name), value))
        else:
            self.scope.set(name, value)
        return value

    def _assign_element(self, name: str, node: Node, value: ShellWord) -> None:
        before = self.scope.get(name)
        try:
            place = self.words.number(node["Index"])
        except Unknown:
            place = -1
        if isinstance(before, tuple | None) and 0 <= place <= len(before or ()):
            self.scope.set(name, (*(before or ())[:place], value, *(before or ())[place + 1 :]))
        else:
            self.scope.forget(name, f"${name}, a map")

    def _declare(self, node: Node) -> Status:
        is_local = node["Variant"]["Value"] in _LOCAL
        for each in [each for each in node.get("Args") or () if each.get("Name")]:
            name = each["Name"]["Value"]
            if self.locals and is_local:
                self.locals[-1].setdefault(name, (self.scope.has(name), self.scope.get(name)))
            if each.get("Value") is not None or each.get("Array"):
                self._assign(each)
            elif is_local and (self.locals or not self.scope.has(name)):
                self.scope.set(name, None)
        return True

    # ------------------------------------------------------------------ conditions

    def _pair(self, node: Node) -> Status:
        if node["Op"] in ("|", "|&"):
            output, self.output = self.output, None
            self._run_apart(lambda: self._statement(node["X"]))
            self._run_apart(lambda: self._statement(node["Y"]))
            self.output = output
            self._write(self._outside(node))
            return None
        first = self._statement(node["X"])
        if first is None:
            self._branches([lambda: self._statement(node["Y"]), lambda: None], self._reason(node["X"]))
            return None
        return self._statement(node["Y"]) if first == (node["Op"] == "&&") else first

    def _if(self, node: Node) -> Status:
        if not node.get("Cond"):  # else
            return self.run(node["Then"])
        status = self.run(node["Cond"])
        other = node.get("Else")
        if status is None:
            paths: list[Callable[[], object]] = [lambda: self.run(node["Then"])]
            paths.append((lambda: self._if(other)) if other else lambda: None)
            self._branches(paths, self._reason(node["Cond"][-1]))
            return None
        return self.run(node["Then"]) if status else self._if(other) if other else True

    def _case(self, node: Node) -> Status:
        subject, taken, certain = self.words.value(node["Word"]), list[Node](), False
        for item in node.get("Items") or ():
            found = [matches(subject, pattern, self.words) for pattern in item["Patterns"]]
            matched = True if True in found else None if None in found else False
            if matched is not False:
                taken.append(item)
            if item["Op"] != ";;" and matched is not False:
                raise ShellSyntaxError(f"line {line_of(item)}: a branch of `case` that goes on is not read")
            if matched:
                certain = True
                break
        if certain and len(taken) == 1:
            return self.run(taken[0].get("Stmts") or ())
        paths = [lambda item=item: self.run(item.get("Stmts") or ()) for item in taken]
        if taken:
            self._branches([*paths, *([] if certain else [lambda: None])], self._reason(node["Word"]))
        return None if taken else True

    def _branches(self, paths: Sequence[Callable[[], object]], reason: str) -> None:
        """Take all paths, each with its own variables; a path that ends the script is not the one taken."""
        before, after = self.scope, list[Scope]()
        ended: _End | None = None
        for path in paths:
            self.scope = before.copy()
            written = len(self.output or ())
            try:
                path()
                after.append(self.scope)
            except _End as end:
                ended = end
            if self.output is not None and len(self.output) > written:
                self.output[written:] = [ShellWord(f"`{reason}`", (reason,), whole=True)]
        self.scope = before
        if not after and ended:
            raise ended
        before.merge(after, reason)

    def _reason(self, node: Node) -> str:
        return f"`{' '.join(self.words.spell(node).split()).rstrip(';')[:70]}` in line {line_of(node)}"

    def _let(self, node: Node) -> Status:
        text = self.words.value(node) if node["Type"] == "Word" else ShellWord(self.words.spell(node))
        if text.unknown:
            raise ShellSyntaxError(f"line {line_of(node)}: `let` depends on {', '.join(text.unknown)}", start_of(node))
        own, self.text = self.text, f"(({text.text}))"
        try:
            return self._calculate(parse(self.text)["Stmts"][0]["Cmd"]["X"])
        finally:
            self.text = own

    def _calculate(self, node: Node) -> Status:
        try:
            return self.words.number(node) != 0
        except Unknown as unknown:
            self._forget([node], unknown.reasons[0] if unknown.reasons else "an expression")
            return None

    def _forget(self, nodes: list[Node], reason: str) -> None:
        """Make the variables unknown that an expression would set."""
        for node in nodes:
            if node.get("Op") in ("=", "+=", "-=", "*=", "/=", "%=", "++", "--"):
                self.scope.forget(self.words.spell(node["X"]), reason)
            self._forget([node[key] for key in ("X", "Y") if isinstance(node.get(key), dict)], reason)

    # ------------------------------------------------------------------ loops

    def _condition(self, node: Node) -> Status:
        status = self.run(node["Cond"])
        return not status if node.get("Until") and status is not None else status

    def _loop(self, condition: Callable[[], Status], body: Callable[[], object], node: Node) -> Status:
        while True:
            status = condition()
            if status is None:
                self._branches([self._round(body), lambda: None], self._reason(node))
                return None
            if not status or self._round(body)() == "break":
                return True

    def _round(self, body: Callable[[], object]) -> Callable[[], str | None]:
        def run() -> str | None:
            try:
                body()
            except _End as end:
                if end.what not in ("break", "continue"):
                    raise
                return end.what
            return None

        return run

    def _run_for(self, node: Node) -> Status:
        loop = node["Loop"]
        if loop["Type"] == "CStyleLoop":
            if loop.get("Init"):
                self._calculate(loop["Init"])

            def rest() -> None:
                self._round(lambda: self.run(node["Do"]))()
                if loop.get("Post"):
                    self._calculate(loop["Post"])

            return self._loop(lambda: self._calculate(loop["Cond"]) if loop.get("Cond") else None, rest, node)
        items = [word for each in loop.get("Items") or () for word in self.words.fields(each)]
        name, body = loop["Name"]["Value"], self._round(lambda: self.run(node["Do"]))
        if any(word.whole for word in items) or node.get("Select"):
            reason = self._reason(node)
            self.scope.forget(name, reason)
            self._branches([body, lambda: None], reason)
            return None
        for word in items:
            self.scope.set(name, word)
            if body() == "break":
                break
        return True

    # ------------------------------------------------------------------ calls

    def _run_apart(self, run: Callable[[], Status]) -> Status:
        """Run with a copy of the variables, as in a subshell."""
        scope, functions = self.scope, dict(self.functions)
        self.scope = scope.copy()
        try:
            return run()
        except _End:
            return None
        finally:
            self.scope, self.functions = scope, functions

    def _substitute(self, node: Node) -> ShellWord:
        """Return the output of a command substitution. Raises Unknown."""
        before, self.output = self.output, []
        try:
            self._run_apart(lambda: self.run(node.get("Stmts") or ()))
            output = self.output
        finally:
            self.output = before
        reasons = tuple(dict.fromkeys(reason for word in output for reason in word.unknown))
        if reasons:
            raise Unknown(*reasons)
        return ShellWord("".join(word.text for word in output).rstrip("\n"))

    def _write(self, word: ShellWord) -> None:
        if self.output is not None:
            self.output.append(word)

    def _outside(self, node: Node) -> ShellWord:
        return ShellWord("", (f"the output of {self._reason(node)}",), whole=True)

    def _call(self, node: Node) -> Status:
        words = [word for each in node["Args"] for word in self.words.fields(each)]
        if not words:
            return True
        if words[0].text in self.functions and not words[0].unknown:
            return self._call_function(words[0].text, words[1:])
        return self._call_builtin(words, node)

    def _call_builtin(self, words: Sequence[ShellWord], node: Node) -> Status:
        """Do what a command of the shell does; every other command is a program."""
        name, arguments = words[0].text, words[1:]
        match name:
            case ":" | "true" | "false":
                return name != "false"
            case "exit" | "return" | "break" | "continue":
                raise _End(name)
            case "[" | "test":
                return check_words(words)
            case "eval":
                return self._read_text(
                    ShellWord(" ".join(word.text for word in arguments), (), words[0].start, words[-1].end)
                )
            case "read" | "mapfile" | "readarray" | "getopts":
                for word in arguments:
                    if re.fullmatch(r"[A-Za-z_]\w*", word.text):
                        self.scope.forget(word.text, self._reason(node))
                return None
            case "echo" | "printf":
                self._echo(words, node)
            case "unset":
                for word in arguments:
                    self.scope.set(word.text, None)
            case "source" | ".":
                self.script.included += [word.text for word in arguments[:1]]
            case "set":
                if arguments and arguments[0].text == "--":
                    self.scope.arguments = tuple(arguments[1:])
            case "shift":
                self.scope.arguments = self.scope.arguments and self.scope.arguments[1:]
            case "seq":
                self._write(ShellWord(numbers) if (numbers := count(arguments)) is not None else self._outside(node))
            case _:
                return self._start(words, node)
        return True

    def _start(self, words: Sequence[ShellWord], node: Node) -> Status:
        """Add a program with its arguments to the script's commands."""
        self.script.commands.append(Command(tuple(words), line_of(node)))
        if place := next((at for at in range(len(words) - 1) if _is_inline(words, at)), None):
            self._run_apart(lambda: self._read_text(words[place + 1]))
        if _NO_NPU.search(" ".join(word.text for word in words)):
            return False
        self._write(self._outside(node))
        return None

    def _call_function(self, name: str, words: Sequence[ShellWord]) -> Status:
        if self.depth >= _DEEPEST:
            raise ShellSyntaxError(f"the function {name} calls itself more than {_DEEPEST} times")
        (body, own_text), text, arguments = self.functions[name], self.text, self.scope.arguments
        self.text, self.depth = own_text, self.depth + 1
        self.scope.arguments = tuple(words)
        self.locals.append({})
        try:
            return self._statement(body)
        except _End as end:
            if end.what != "return":
                raise
            return None
        finally:
            self.text, self.depth = text, self.depth - 1
            self.scope.arguments = arguments
            for replaced, (there, value) in self.locals.pop().items():
                self.scope.variables.pop(replaced, None)
                if there:
                    self.scope.set(replaced, value)

    def _read_text(self, word: ShellWord) -> Status:
        """Run text that a shell inside the script would read."""
        if self.depth >= _DEEPEST:
            raise ShellSyntaxError("the script evaluates text too often")
        text, place, self.depth = self.text, self.place, self.depth + 1
        self.text, self.place = word.text, place or (word.start, word.end)
        try:
            return self.run(parse(word.text).get("Stmts") or ())
        finally:
            self.text, self.place, self.depth = text, place, self.depth - 1

    def _echo(self, words: Sequence[ShellWord], node: Node) -> None:
        rest = [word for word in words[1:] if not re.fullmatch(r"-[neE]+", word.text)]
        if words[0].text == "printf":
            rest = list(words[2:])
            if len(words) > 1 and not re.fullmatch(r"%s(\\n)?", words[1].text):
                self._write(words[1] if not rest and "%" not in words[1].text else self._outside(node))
                return
        for place, word in enumerate(rest):
            self._write(ShellWord(f" {word.text}" if place else word.text, word.unknown))
        self._write(ShellWord("\n"))


def _hides_output(redirection: Node) -> bool:
    return redirection["Op"] in (">", ">>", "&>", "&>>", ">|") and redirection.get("N", {}).get("Value", "1") == "1"


def _is_inline(words: Sequence[ShellWord], at: int) -> bool:
    """Return whether the word after `at` is text for a shell: `bash -c TEXT`."""
    shell = next((word.text for word in reversed(words[:at]) if not word.text.startswith("-")), "")
    return at > 0 and shell.rpartition("/")[2] in _SHELLS and bool(re.fullmatch(r"-\w*c", words[at].text))
