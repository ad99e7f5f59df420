"""One thin module for each DVC stage."""

from gate.openmp import wait_asleep

wait_asleep()
