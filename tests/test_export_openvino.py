"""Taps in OpenVINO's converted draft.   pytest -q tests/test_export_openvino.py"""

import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from eyas.errors import BadInput
from eyas.export.openvino import layer_list, mend

CONVERTED = """<?xml version="1.0"?>
<net name="Model0" version="11">
	<layers />
	<rt_info>
		<Runtime_version value="2026.4.1" />
		<eagle3_mode value="True" />
		<optimum>
			<optimum_version value="2.3.0" />
		</optimum>
	</rt_info>
</net>
"""


def test_taps_are_written_beside_the_mode(tmp_path: Path):
    file = tmp_path / "openvino_model.xml"
    file.write_text(CONVERTED)
    assert mend(tmp_path, (2, 15, 27))
    info = ET.parse(file).getroot().find("rt_info")
    assert [e.tag for e in info][:3] == ["Runtime_version", "eagle3_mode", "hidden_layers_list"]
    assert info.find("hidden_layers_list").get("value") == "1 14 26"  # outputs of layers, by spaces
    assert not mend(tmp_path, (2, 15, 27))
    assert mend(tmp_path, (3, 16, 28))
    assert [e.get("value") for e in ET.parse(file).getroot().iter("hidden_layers_list")] == ["2 15 27"]
    assert [p.name for p in tmp_path.iterdir()] == ["openvino_model.xml"]


def test_what_is_no_converted_draft_is_refused(tmp_path: Path):
    with pytest.raises(BadInput, match="convert the draft first"):
        mend(tmp_path, (2, 15, 27))
    (tmp_path / "openvino_model.xml").write_text(CONVERTED.replace("eagle3_mode", "other"))
    with pytest.raises(BadInput, match="no eagle3_mode"):
        mend(tmp_path, (2, 15, 27))
    for taps in ((0, 4, 5), (1, 2, 3, 4)):
        with pytest.raises(BadInput, match="exactly three"):
            layer_list(taps)
