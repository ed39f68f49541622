-- Keeps what a replica published alive, says its state, and forgets members that have vanished.
-- KEYS: members, replica, blocks    ARGV: prefix, name, incarnation, seq, state, ttl ms
-- Answers OK, GAP (what is held is not what was published), WRONG_INCARNATION or UNKNOWN.
for _, member in ipairs(redis.call('SMEMBERS', KEYS[1])) do
  if redis.call('EXISTS', ARGV[1] .. 'r:' .. member) == 0 then
    redis.call('SREM', KEYS[1], member)
  end
end
local held = redis.call('HMGET', KEYS[2], 'incarnation', 'seq', 'blocks')
if not held[1] then
  return 'UNKNOWN'
end
if held[1] ~= ARGV[3] then
  return 'WRONG_INCARNATION'
end
redis.call('SADD', KEYS[1], ARGV[2])
redis.call('HSET', KEYS[2], 'state', ARGV[5])
if redis.call('PTTL', KEYS[1]) < tonumber(ARGV[6]) then -- others may live longer
  redis.call('PEXPIRE', KEYS[1], ARGV[6])
end
redis.call('PEXPIRE', KEYS[2], ARGV[6])
redis.call('PEXPIRE', KEYS[3], ARGV[6])
if held[2] ~= ARGV[4] or redis.call('SCARD', KEYS[3]) ~= tonumber(held[3]) then
  return 'GAP'
end
return 'OK'
