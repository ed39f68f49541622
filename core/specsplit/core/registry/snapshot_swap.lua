-- Puts a collected snapshot in the place of the set in use.
-- KEYS: replica, blocks, collected    ARGV: incarnation, seq, number of blocks
-- Answers OK, STALE, GAP (a part is missing), WRONG_INCARNATION or UNKNOWN; only OK changes anything.
local held = redis.call('HMGET', KEYS[1], 'incarnation', 'seq')
if not held[1] then
  return 'UNKNOWN'
end
if held[1] ~= ARGV[1] then
  return 'WRONG_INCARNATION'
end
if tonumber(ARGV[2]) <= (tonumber(held[2]) or -1) then
  return 'STALE'
end
if redis.call('SCARD', KEYS[3]) ~= tonumber(ARGV[3]) then
  return 'GAP'
end
redis.call('UNLINK', KEYS[2])
if tonumber(ARGV[3]) > 0 then
  redis.call('RENAME', KEYS[3], KEYS[2])
  redis.call('PEXPIRE', KEYS[2], redis.call('PTTL', KEYS[1]))
end
redis.call('HSET', KEYS[1], 'seq', ARGV[2], 'blocks', ARGV[3])
return 'OK'
