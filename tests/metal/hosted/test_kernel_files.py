import re
from pathlib import Path

from tests.metal.hosted.kernel_files import write_kernel_files


def test_every_kernel_stands_once_in_the_file_of_its_text_and_nothing_is_included(
    tmp_path: Path,
) -> None:
    kernels = write_kernel_files(tmp_path)
    assert {path.name for path in tmp_path.glob("*.metal")} == set(kernels)
    for file, names in kernels.items():
        text = (tmp_path / file).read_text()
        assert not re.search(r'#include\s+"', text)
        # A template is instantiated under the kernel's name; a plain function has it.
        found = re.findall(r'host_name\("(\w+)"\)', text) or re.findall(
            r"kernel\]*\s+void\s+(\w+)\(", text
        )
        assert sorted(found) == sorted(names)
