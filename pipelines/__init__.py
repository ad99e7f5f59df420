"""One thin module for each DVC stage."""

from gate.installation import wait_asleep

wait_asleep()
