"""Checks before the start: agents, versions, program and reachability. Names every host that fails and the cause."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

from unisono.amounts import format_seconds
from unisono.errors import PreflightError
from unisono.launch.job import LaunchJob
from unisono.launch.transport import ssh
from unisono.launch.transport.link import AgentLink, AgentLinks, agent_command
from unisono.launch.transport.wire import Message

Print = Callable[[str], None]
_PROBE_TIMEOUT = 3.0


def gather(job: LaunchJob, links: AgentLinks, show: Print) -> None:
    """Start an agent on every host, in parallel, and check each; PreflightError names every host that fails."""
    began = time.monotonic()
    deadline = began + job.start_timeout
    for placement in job.placements:
        host = placement.host
        if host.is_local:
            command = agent_command()
        else:
            command = ssh.command(host.name, job.ssh, job.python, job.start_timeout)
        link = links.start(host.name, command)
        link.is_local = host.is_local
        link.ranks = range(placement.first_rank, placement.first_rank + placement.count)
    problems = _greet(job, links, deadline)
    problems |= _versions(links, problems)
    healthy = [link for link in links if link.host not in problems]
    problems |= _program(job, healthy, links, deadline)
    if job.verbose:
        _print_result(job, links, problems, time.monotonic() - began, show)
        if not problems and job.several_hosts:
            reached_at = addresses(links)
            for line in matrix_lines(links, matrix(links, reached_at)):
                show(line)
    if problems:
        raise PreflightError(problems)


def _greet(job: LaunchJob, links: AgentLinks, deadline: float) -> dict[str, str]:
    problems = {}
    answers = links.await_event(list(links), "hello", deadline)
    for link in links:
        answer = answers.get(link)
        if answer is None:
            problems[link.host] = f"no answer within --start-timeout {job.start_timeout:g} s"
        elif answer["event"] == "closed":
            problems[link.host] = ssh.cause(link, job.python)
        else:
            link.hello = answer
    return problems


def _versions(links: AgentLinks, known: dict[str, str]) -> dict[str, str]:
    """All hosts must have the versions of the first one."""
    problems: dict[str, str] = {}
    healthy = [link for link in links if link.host not in known]
    for link in healthy:
        for package in ("unisono", "torch"):
            have, want = link.hello[package], healthy[0].hello[package]
            if link.host in problems:
                continue
            if have is None:
                problems[link.host] = f"{package} is not installed for its python ({link.hello['python']})"
            elif have != want:
                problems[link.host] = f"{package} {have} there, but {want} on {healthy[0].host}: install the same"
    return problems


def _program(job: LaunchJob, healthy: Sequence[AgentLink], links: AgentLinks, deadline: float) -> dict[str, str]:
    request = {"do": "check", "program": asdict(job.program)}
    answers = links.request([(link, request) for link in healthy], "checked", deadline)
    problems = {}
    for link in healthy:
        answer = answers.get(link, {"event": "closed"})
        if answer["event"] == "closed":
            problems[link.host] = f"its agent stopped answering: {ssh.cause(link, job.python)}"
        elif answer["problem"]:
            problems[link.host] = answer["problem"]
    return problems


def _print_result(job: LaunchJob, links: AgentLinks, problems: dict[str, str], seconds: float, show: Print) -> None:
    show(f"preflight of {len(links.all)} host(s), {job.world} ranks, in {format_seconds(seconds, 's', 1)}:")
    for link in links:
        ranks = f"ranks {link.ranks.start}-{link.ranks.stop - 1}"
        if link.host in problems:
            show(f"  {link.host}: {problems[link.host]}")
            continue
        versions = ", ".join(f"{name} {link.hello[name]}" for name in ("python", "unisono", "torch"))
        show(f"  {link.host}: ok, {ranks}, {versions}")


def addresses(links: AgentLinks) -> dict[AgentLink, str]:
    """The address of each node for the others: as in its ssh connection, or its name if that is unknown."""
    if len(links.all) == 1:
        return {links.all[0]: "127.0.0.1"}
    here = launcher_address(links)
    return {link: (here if link.is_local else link.hello["address"]) or link.host for link in links}


def launcher_address(links: AgentLinks) -> str | None:
    """This host's address as the other hosts see it; None if unknown."""
    seen_by_others = [link.hello["launcher_address"] for link in links if not link.is_local]
    return next((address for address in seen_by_others if address), None)


def open_store_port(job: LaunchJob, links: AgentLinks, master: AgentLink, address: str) -> int:
    """Have the master's host listen for the job's store; return the port."""
    request: Message = {"do": "listen", "name": "store", "address": address, "port": job.master_port}
    answers = links.request([(master, request)], "listening", time.monotonic() + job.start_timeout)
    answer = answers.get(master, {})
    if "port" not in answer:
        problem = answer.get("problem", "its agent stopped answering")
        raise PreflightError(
            {
                master.host: f"the master port {job.master_port} cannot be used: {problem};"
                " give another with --master-port, or none to have a free one chosen"
            }
        )
    return int(answer["port"])


def reserve_port(job: LaunchJob, links: AgentLinks, master: AgentLink) -> int:
    """Have the master's host keep a port for programs that open a store of torch's there; return it."""
    request: Message = {"do": "reserve"}
    answers = links.request([(master, request)], "reserved", time.monotonic() + job.start_timeout)
    if "port" not in answers.get(master, {}):
        raise PreflightError({master.host: "its agent stopped answering"})
    return int(answers[master]["port"])


def keep_secret(job: LaunchJob, links: AgentLinks, folder: Path, secret: bytes) -> None:
    """Have every host keep the job's secret in a new folder, until its agent ends."""
    request: Message = {"do": "keep", "folder": str(folder), "secret": secret.hex()}
    deadline = time.monotonic() + job.start_timeout
    answers = links.request([(link, request) for link in links], "kept", deadline)
    problems = {link.host: answers.get(link, {}).get("problem", "its agent stopped answering") for link in links}
    if any(problems.values()):
        raise PreflightError({host: problem for host, problem in problems.items() if problem})


def require_reach(links: AgentLinks, master: AgentLink, address: str, port: int) -> None:
    """Every host must reach the master's port; else its ranks would wait for minutes before they fail."""
    others = [link for link in links if link is not master]
    probe = {"do": "probe", "targets": [(address, port)], "timeout": _PROBE_TIMEOUT}
    deadline = time.monotonic() + 10 + _PROBE_TIMEOUT
    answers = links.request([(link, probe) for link in others], "probed", deadline)
    found = {link: answers.get(link, {}).get("found", ["no answer"])[0] for link in others}
    causes = {
        link.host: f"cannot reach {master.host} at {address} port {port}: {cause};"
        " if a firewall is in between, choose an open port with --master-port"
        for link, cause in found.items()
        if isinstance(cause, str)
    }
    if causes:
        raise PreflightError(causes)


def matrix(links: AgentLinks, reached_at: dict[AgentLink, str]) -> list[list[float | str]]:
    """From node (row) to node (column): milliseconds to connect, or the error."""
    deadline = time.monotonic() + 10 + _PROBE_TIMEOUT * len(links.all)
    request: Message = {"do": "listen", "name": "probe", "port": 0}
    ports = links.request(
        [(link, {**request, "address": "::" if ":" in reached_at[link] else ""}) for link in links],
        "listening",
        deadline,
    )
    targets = [(reached_at[link], ports.get(link, {}).get("port", 0)) for link in links]
    probe = {"do": "probe", "targets": targets, "timeout": _PROBE_TIMEOUT}
    found = links.request([(link, probe) for link in links], "probed", deadline)
    unknown = ["no answer"] * len(targets)
    return [found.get(link, {}).get("found", unknown) for link in links]


def matrix_lines(links: AgentLinks, cells: list[list[float | str]]) -> list[str]:
    names = [link.host for link in links]
    texts = [[cell if isinstance(cell, str) else format_seconds(cell, "ms", 2) for cell in row] for row in cells]
    width = max(len(text) for text in [*names, *(text for row in texts for text in row)])
    lines = ["connections (row to column):", "  " + " ".join(f"{name:>{width}}" for name in ["", *names])]
    for name, row in zip(names, texts, strict=True):
        lines.append("  " + " ".join(f"{text:>{width}}" for text in [name, *row]))
    return lines
