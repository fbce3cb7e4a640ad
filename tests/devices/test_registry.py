"""Names and addresses of devices, and the file that they stand in."""

import json
import stat

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vitdeploy.devices.call import command, why
from vitdeploy.devices.registry import (
    Device,
    find_devices,
    new_device,
    read_devices,
    registry_file,
    this_machine,
    write_devices,
)
from vitdeploy.errors import UnknownDeviceError


@pytest.fixture(autouse=True)
def config(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))


def added(name="orin", address="ssh://nano@10.0.0.7", python="python3", labels=(), ssh_config=None):
    return new_device(name, address, python, labels, ssh_config)


@pytest.mark.parametrize(
    ("address", "host", "user", "port"),
    [
        ("ssh://nano@10.0.0.7", "10.0.0.7", "nano", None),
        ("ssh://Orin-Lab", "Orin-Lab", None, None),
        ("ssh://me@[fe80::1]:2222", "fe80::1", "me", 2222),
        ("ssh://pi.local:22/", "pi.local", None, 22),
    ],
)
def test_addresses(address, host, user, port):
    device = added(address=address)
    assert (device.host, device.user, device.port) == (host, user, port)
    assert added(address=device.address) == device


@pytest.mark.parametrize(
    "address",
    [
        *("nano@10.0.0.7", "http://host", "ssh://", "ssh://-oProxyCommand=id", "ssh://-l@host", "ssh://a@-host"),
        *("ssh://host/path", "ssh://host:0", "ssh://host:99999", "ssh://user:password@host", "ssh://ho st"),
        *("ssh://host;id", "ssh://$(id)@host", "ssh://host?x=1", "ssh://[::1", "ssh://host%00", ""),
    ],
)
def test_what_is_no_address_is_refused(address):
    with pytest.raises(UnknownDeviceError, match="not a valid device address"):
        added(address=address)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": "-v"}, "not a valid device name"),
        ({"name": "local"}, "not a valid device name"),
        ({"name": "a,b"}, "not a valid device name"),
        ({"labels": ("a b",)}, "not a valid label"),
        ({"python": "python3; rm -rf ~"}, "not a valid path of a Python"),
        ({"python": "-c"}, "not a valid path of a Python"),
    ],
)
def test_names_labels_and_pythons_are_checked(changes, message, tmp_path):
    with pytest.raises(UnknownDeviceError, match=message):
        added(**changes)
    with pytest.raises(UnknownDeviceError, match="no file"):
        added(ssh_config=tmp_path / "absent")


@settings(max_examples=200)
@given(st.text(max_size=30), st.text(max_size=30))
def test_no_address_becomes_an_option_or_a_shell_word(user, host):
    """Whatever stands in an address, what ssh gets are our options, one host, and one line."""
    try:
        device = added(address=f"ssh://{user}@{host}")
    except UnknownDeviceError:
        return
    argv = command(device, ["-c", "code"])
    assert argv[-2] == device.host and argv[-3] == "--" and not argv[-2].startswith("-")
    assert argv[argv.index("-l") + 1] == device.user if device.user else "-l" not in argv
    assert argv[-1] == "python3 -c code"
    assert not [word for word in argv if "StrictHostKeyChecking" in word or "UserKnownHostsFile" in word]


def test_a_python_in_the_home_folder_is_found_by_any_login_shell():
    assert command(added(python="~/venv/bin/python"), ["x"])[-1] == '"$HOME"/venv/bin/python x'
    assert command(this_machine(), ["-c", "a b"])[1:] == ["-c", "a b"]


def test_devices_are_kept_in_a_private_file_and_found_by_name_and_label():
    write_devices({d.name: d for d in (added("a", labels=("lab",)), added("b", labels=("lab",)), added("lab2"))})
    assert stat.S_IMODE(registry_file().stat().st_mode) == 0o600
    assert set(read_devices()) == {"a", "b", "lab2"}
    assert [d.name for d in find_devices("lab,local,a")] == ["a", "b", "local"]
    with pytest.raises(UnknownDeviceError, match="did you mean 'lab2'") as caught:
        find_devices("lab3")
    assert "vitdeploy devices add lab3" in caught.value.fix


def test_a_label_that_a_device_is_called_after_is_still_a_label():
    write_devices({d.name: d for d in (added("a", labels=("lab",)), added("lab", labels=("others",)))})
    assert [d.name for d in find_devices("lab")] == ["lab"]
    assert [d.name for d in find_devices("label:lab,lab")] == ["a", "lab"]
    assert [d.name for d in find_devices("label:others")] == ["lab"]
    with pytest.raises(UnknownDeviceError, match="no device has the label 'a'") as caught:
        find_devices("label:a")
    assert caught.value.expected == "lab, others" and "--label a" in caught.value.fix


@pytest.mark.parametrize(
    "device",
    [{"host": "-oProxyCommand=id"}, {"user": "-x"}, {"port": "22"}, {"host": None}, {"python": "a b"}, {"more": 1}],
)
def test_a_file_that_was_written_by_hand_is_checked_too(device):
    right = {"name": "a", "host": "h", "user": None, "port": None, "python": "py", "labels": [], "ssh_config": None}
    registry_file().parent.mkdir(parents=True, exist_ok=True)
    registry_file().write_text(json.dumps({"format": 1, "devices": [{**right, **device}]}))
    with pytest.raises(UnknownDeviceError):
        read_devices()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("ssh: connect to host h port 22: Connection timed out", "cannot be reached"),
        ("h: Permission denied (publickey).", "accepts none of your keys"),
        ("config: terminating, 1 bad configuration options", "cannot be reached"),
        ("", "cannot be reached"),
    ],
)
def test_what_ssh_says_becomes_an_error_with_a_fix(words, message):
    error = why(Device("orin", "h"), 255, words)
    assert message in error.message and error.fix and error.exit_code == 4
