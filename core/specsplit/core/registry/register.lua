-- Takes the name of a replica for an incarnation, if the name is held by the one expected ('' for nobody).
-- KEYS: members, replica    ARGV: prefix, name, incarnation, expected, address, state, ttl ms, seq
-- Answers OK or TAKEN.
local function is_a(type, key)
  local found = redis.call('TYPE', key).ok
  return found == type or found == 'none'
end
for index, type in ipairs({'set', 'hash'}) do -- what somebody else wrote there helps nobody
  if not is_a(type, KEYS[index]) then
    redis.call('UNLINK', KEYS[index])
  end
end
local held = redis.call('HGET', KEYS[2], 'incarnation') or ''
if held ~= ARGV[4] then
  return 'TAKEN'
end
if held ~= '' then
  redis.call('UNLINK', ARGV[1] .. 'b:' .. ARGV[2] .. ':' .. held, KEYS[2])
end
redis.call('HSET', KEYS[2], 'incarnation', ARGV[3], 'seq', ARGV[8], 'address', ARGV[5], 'state', ARGV[6], 'blocks', 0)
redis.call('PEXPIRE', KEYS[2], ARGV[7])
redis.call('SADD', KEYS[1], ARGV[2])
keep_members(KEYS[1], ARGV[7])
return 'OK'
