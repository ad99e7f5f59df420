"""One thin module for each DVC stage."""

from gate.installation import limit_openmp_spinning

limit_openmp_spinning()
