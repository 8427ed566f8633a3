"""Implements `whale run`: starts the ranks through mpirun, prints their output, and ends all of them together.

The processes of a run, each started by the one above it:

    whale run        options -> run.py: listens on TCP, starts mpirun (mpirun.py), and runs the event loop (job/)
      mpirun         starts one worker per rank
        worker       connects to the launcher, forks the script (script.py), relays its output as frames (protocol.py)
          script     the user's program, as __main__

"Launcher" means the `whale run` process. The worker is a process apart from the script, because it must outlive the
script to report how it ended, and must be able to kill the script when the launcher is gone, whatever the script is
doing. The worker forks before TensorFlow or any other library is loaded, since a fork with threads running is not safe.
"""
