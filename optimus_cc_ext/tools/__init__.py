"""Tools that training does not need: the command line `optimus-cc`, planner, doctor, report, patch, data and our own
pretrain_gpt. They stand on the extension, which never imports them: without this folder every script still trains.
"""
