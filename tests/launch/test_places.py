"""No public face: a rank's place is told by variables that are gone once the rank has read them."""

from paraxis.launch._options import Options
from paraxis.launch._ranks import environment
from paraxis.launch._variables import Place


def test_a_rank_has_its_own_place_whatever_the_surroundings_say() -> None:
    place = Place("127.0.0.1:5000", 3, 2, attempt=1, grace=5, stuck_after=7)
    around = Place("10.0.0.1:6000", 2, 0, grace=9).written()
    assert Place.read(environment(place, Options(3, __file__), around)) == place
